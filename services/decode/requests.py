"""The requests in progress on decode. Each branch of a request is one token stream to one frontend."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import reduce
from typing import Final

from opentelemetry.trace import Span

from components.errors import MeshError
from components.lifecycle import Lifecycle, Tally
from components.messaging.outbox import OutStream, StreamOutbox
from components.telemetry.spans import CurrentSpan, mark_outcome, record_step
from components.wire.generate import GenerateRequest, PromptOrigin
from components.wire.step_stats import DraftCounts
from components.wire.tokens import PromptBlocks
from engine.ports import TokenMask, TokenOutput

log = logging.getLogger(__name__)

SPAN_LOCAL_PREFILL: Final = "decode.prefill"
SPAN_FIRST: Final = "decode.first_token"


class RequestState(StrEnum):
    """While prefill computes the prompt, the request is ACCEPTED; `InboundState` has the details."""

    ACCEPTED = auto()  # accepted; the prompt is not queued on this instance
    WAITING = auto()  # the prompt is queued or being computed on this instance
    RUNNING = auto()  # it has its first token
    ENDED = auto()  # finished, failed or cancelled


S = RequestState
NEXT: Final = {
    S.ACCEPTED: {S.WAITING, S.RUNNING, S.ENDED},
    S.WAITING: {S.RUNNING, S.ENDED},
    S.RUNNING: {S.ENDED},
}


@dataclass(slots=True)
class ActiveRequest:
    engine_id: str  # unique in the mesh
    request: GenerateRequest
    token_ids: list[int]
    prediction: list[int]  # tokens that the answer may repeat
    blocks: PromptBlocks
    streams: dict[int, OutStream]
    span: Span
    lifecycle: Lifecycle[RequestState]
    mask: TokenMask | None = None
    num_cached: int = 0  # tokens; prefix hit on decode when the request arrived
    prefill_hit: int = 0  # tokens; prefix hit on prefill
    waiting_since_ns: int = 0
    waiting_span: str = SPAN_LOCAL_PREFILL  # name of the span that ends with the first token
    accepted_ns: int = field(default_factory=time.time_ns)
    first_token_ns: int = 0
    early_token: int | None = None  # first token, if it was sent before the prompt's KV arrived
    num_generated: int = 0  # over all branches
    draft_counts: dict[int, DraftCounts] = field(default_factory=dict)  # by branch
    prefill: str = ""  # id of the chosen prefill instance
    why_local: str = ""  # reason for local prefill; empty: none
    expiry: asyncio.TimerHandle | None = None
    error: MeshError | None = None

    def enter(self, state: RequestState) -> None:
        """Enter `state`. Ignored after ENDED, because the request's task may still be running."""
        if not self.lifecycle.is_over:
            self.lifecycle.advance(state)

    def drafts(self) -> dict[str, int]:
        """Span attributes that count drafts over all branches; empty if none was checked."""
        if not self.draft_counts:
            return {}
        counts = reduce(DraftCounts.plus, self.draft_counts.values())
        return {"kvmesh.draft_tokens": counts.checked, "kvmesh.accepted_tokens": counts.accepted}

    def wait(self, span: str) -> None:
        """Start the span that ends with the first token, in place of an earlier one."""
        self.waiting_since_ns, self.waiting_span = time.time_ns(), span


class ActiveRequests:
    def __init__(self, outbox: StreamOutbox) -> None:
        self.tally = Tally(NEXT)
        self.outbox = outbox
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._by_stream: dict[tuple[str, int], tuple[ActiveRequest, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def lifecycle(self, engine_id: str) -> Lifecycle[RequestState]:
        return Lifecycle(f"decode {engine_id}", NEXT, S.ACCEPTED, self.tally)

    def add(self, active: ActiveRequest) -> None:
        self._idle.clear()
        self._by_engine_id[active.engine_id] = active
        for branch, stream in active.streams.items():
            self._by_stream[stream.reply_to, stream.stream_id] = active, branch

    def find(self, engine_id: str) -> ActiveRequest | None:
        return self._by_engine_id.get(engine_id)

    def of_stream(self, reply_to: str, stream_id: int) -> tuple[ActiveRequest, int] | None:
        """Returns the request and its branch."""
        return self._by_stream.get((reply_to, stream_id))

    def of_frontend(self, reply_to: str) -> list[ActiveRequest]:
        return [active for active in self._by_engine_id.values() if active.request.reply_to == reply_to]

    def all(self) -> list[ActiveRequest]:
        return list(self._by_engine_id.values())

    async def drained(self) -> None:
        await self._idle.wait()

    def emit(self, output: TokenOutput) -> None:
        active = self._by_engine_id.get(output.request_id)
        if active is None or (stream := active.streams.get(output.branch)) is None:
            return
        token_ids = output.token_ids
        active.num_generated += len(token_ids)
        counts = output.draft_counts
        if counts is not None:
            active.draft_counts[output.branch] = counts
            if not active.prediction:
                counts = None  # the frontend would not read them
        is_plain = output.finish is None and output.logprobs is None and counts is None
        if is_plain and active.first_token_ns:  # the common case
            self.outbox.put_tokens(stream, token_ids)
            return
        sent_ns = self._first_token(active) if not active.first_token_ns else 0
        finish = None if output.finish is None else str(output.finish)
        item = stream.tokens(
            token_ids,
            finish,
            max(output.num_cached_tokens, min(active.prefill_hit, len(active.token_ids))) if sent_ns else 0,
            sent_ns,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        if sent_ns and active.request.wants_origin:
            item = item._replace(origin=PromptOrigin(active.prefill, active.why_local))
        if counts is not None:
            item = item._replace(draft_counts=counts)
        self.outbox.put(stream, item)
        if finish is not None:
            self.drop(active, output.branch)

    def drop(self, active: ActiveRequest, branch: int) -> None:
        stream = active.streams.pop(branch)
        del self._by_stream[stream.reply_to, stream.stream_id]
        if not active.streams:
            self._end(active)

    def fail_branch(self, active: ActiveRequest, branch: int, error: MeshError) -> None:
        """End a branch with an error. The frontend waits for the last item even after it has closed the stream."""
        stream = active.streams[branch]
        self.outbox.put(stream, stream.error(error))
        self.drop(active, branch)

    def fail(self, active: ActiveRequest, error: MeshError) -> None:
        if self._by_engine_id.get(active.engine_id) is not active:
            return
        active.error = error
        mark_outcome(active.span, error)
        for stream in active.streams.values():
            self.outbox.put(stream, stream.error(error))
            del self._by_stream[stream.reply_to, stream.stream_id]
        self._end(active)

    def _end(self, active: ActiveRequest) -> None:
        active.lifecycle.advance(S.ENDED)
        del self._by_engine_id[active.engine_id]
        if active.expiry is not None:
            active.expiry.cancel()
        if not self._by_engine_id:
            self._idle.set()
        if active.first_token_ns:
            record_step(
                "decode.generate",
                active.first_token_ns,
                of=active.span,
                attributes={"kvmesh.generated_tokens": active.num_generated, **active.drafts()},
            )
        active.span.end()
        if log.isEnabledFor(logging.DEBUG):
            self._log_end(active)

    def _log_end(self, active: ActiveRequest) -> None:
        now_ns = time.time_ns()
        first_ns = active.first_token_ns or now_ns
        facts = {
            "request_id": active.request.request_id,  # explicit, because this runs outside the request's own context
            "prompt_tokens": len(active.token_ids),
            "cached_tokens": active.num_cached,
            "output_tokens": active.num_generated,
            **{name.removeprefix("kvmesh."): count for name, count in active.drafts().items()},
            "until_first_token_s": round((first_ns - active.accepted_ns) / 1e9, 4),
            "generate_s": round((now_ns - first_ns) / 1e9, 4),
            **{name: text for name, text in (("prefill", active.prefill), ("local_prefill", active.why_local)) if text},
            **({} if active.error is None else {"error": type(active.error).__name__, "cause": active.error.message}),
        }
        with CurrentSpan(active.span):
            log.debug("request ended", extra=facts)

    def _first_token(self, active: ActiveRequest) -> int:
        active.first_token_ns = time.time_ns()
        active.enter(S.RUNNING)
        record_step(active.waiting_span, active.waiting_since_ns, active.first_token_ns, active.span)
        return active.first_token_ns
