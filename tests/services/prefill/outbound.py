"""Outbound transfers without a service: made, told what was computed, and run."""

from collections.abc import Sequence
from typing import Any

from components.kv_transfer.backend import KvTransfer
from components.messaging.clocks import now_ms
from components.telemetry.spans import tracer
from components.wire.logprobs import TokenLogprobs
from components.wire.prefill import PrefillRequest
from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from engine.ports import Exposed
from services.prefill.outbound import OutboundTransfer

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
    return OutboundTransfer(kv, request, tracer.start_span("prefill.request"), **options)


def chunk(pages: Sequence[int], num_computed: int) -> Exposed:
    return Exposed("r", list(pages), num_computed, 0)


def last_chunk(
    pages: Sequence[int], first_token: int, num_cached_tokens: int = 0, logprobs: TokenLogprobs | None = None
) -> Exposed:
    return Exposed("r", list(pages), 0, num_cached_tokens, first_token, logprobs=logprobs)


async def run(transfer: OutboundTransfer) -> None:
    """Raises: why not all was sent."""
    if (outcome := await transfer.run()) is not None:
        raise outcome
