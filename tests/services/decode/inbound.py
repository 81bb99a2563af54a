"""Inbound transfers without a service."""

from typing import Any

from components.kv_transfer.checksum import PageChecksums
from services.decode.inbound import InboundTransfer
from tests.components.discovery.records import record

ROOM, STAMP = "boot/1", 77


def inbound(
    transfer: Any, *, room: str = ROOM, stamp: int = STAMP, checksums: PageChecksums | None = None
) -> InboundTransfer:
    prefill = record("p", "1", role="prefill")
    return InboundTransfer(transfer, "r", prefill, room, stamp, checksums=checksums)
