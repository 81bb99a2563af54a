"""Inbound transfers without a service."""

from typing import Any

from msgspec.structs import replace

from components.kv_transfer.checksum import PageChecksums
from components.lifecycle import Tally
from services.decode.inbound import NEXT, InboundTransfer
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import LAYOUT, endpoint

ROOM, STAMP = "boot/1", 77


def inbound(
    transfer: Any,
    *,
    room: str = ROOM,
    stamp: int = STAMP,
    checksums: PageChecksums | None = None,
    page_size: int = LAYOUT.page_size,
) -> InboundTransfer:
    """`page_size`: prefill's."""
    prefill = record("p", "1", role="prefill", kv=endpoint(layout=replace(LAYOUT, page_size=page_size)))
    return InboundTransfer(transfer, "r", prefill, room, stamp, checksums=checksums, tally=Tally(NEXT))
