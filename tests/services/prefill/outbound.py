"""Outbound transfers without a service."""

from collections.abc import Sequence
from math import inf
from typing import Any

from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.writes import Writes
from components.lifecycle import Tally
from components.messaging.clocks import now_ms
from components.telemetry.spans import tracer
from components.wire.logprobs import TokenLogprobs
from components.wire.prefill import PagesOffered, PrefillRequest
from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from engine.ports import Exposed
from services.prefill.outbound import NEXT, OutboundTransfer

ROOM, STAMP = "boot/1", 77


def outbound(transfer: Any, num_tokens: int, *, stamp: int = STAMP, **options: Any) -> OutboundTransfer:
    request = PrefillRequest(
        request_id="r",
        epoch="e",
        decode_id="d",
        decode_epoch="e",
        room=ROOM,
        stamp=stamp,
        token_ids=pack_tokens(range(num_tokens)),
        deadline_unix_ms=now_ms() + 60_000,
        sampling=SamplingParams(max_tokens=5),
    )
    kv: KvTransfer = transfer
    usual: dict[str, Any] = {
        "tally": Tally(NEXT),
        "writes": Writes(kv),
        "checksums": None,
        "bootstrap_timeout_s": inf,
        "announce": _announce_nothing,
        "num_cached": 0,
        "step_s": float,
    }
    return OutboundTransfer(kv, request, tracer.start_span("prefill.request"), **{**usual, **options})


async def _announce_nothing(_offer: PagesOffered, _last: Exposed) -> None:
    pass


def chunk(pages: Sequence[int], num_computed: int) -> Exposed:
    return Exposed("r", list(pages), num_computed, 0)


def last_chunk(
    pages: Sequence[int], first_token: int, num_cached_tokens: int = 0, logprobs: TokenLogprobs | None = None
) -> Exposed:
    return Exposed("r", list(pages), 0, num_cached_tokens, first_token, logprobs=logprobs)


async def run(transfer: OutboundTransfer) -> None:
    """Raises: the error of the transfer."""
    if (outcome := await transfer.run()) is not None:
        raise outcome
