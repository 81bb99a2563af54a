"""The requests that decode is answering: each branch of an engine request is one stream to one frontend."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Final

from opentelemetry.trace import Span

from components.errors import MeshError
from components.lifecycle import Lifecycle, Tally
from components.messaging.outbox import OutStream, StreamOutbox
from components.routing.block_hash import PromptBlocks
from components.telemetry.spans import mark_outcome, record_span
from components.wire.generate import GenerateRequest
from engine.ports import SamplingParams, TokenMask, TokenOutput

SPAN_LOCAL_PREFILL: Final = "decode.prefill"


class DecodeState(StrEnum):
    """Life of one request here: which queue it stands in."""

    ACCEPTED = auto()  # where its prompt is computed is not decided yet
    PREALLOC = auto()  # a prefill instance was asked, and the engine for pages that the KV can come into
    TRANSFER = auto()  # the pages are offered, the KV is on its way
    WAITING = auto()  # the prompt is queued or computed here
    RUNNING = auto()  # it has its first token
    DONE = auto()
    FAILED = auto()  # or cancelled


S = DecodeState
NEXT: Final = {
    S.ACCEPTED: {S.PREALLOC, S.WAITING, S.FAILED},
    S.PREALLOC: {S.TRANSFER, S.WAITING, S.FAILED},
    S.TRANSFER: {S.RUNNING, S.WAITING, S.FAILED},
    S.WAITING: {S.RUNNING, S.FAILED},
    S.RUNNING: {S.DONE, S.FAILED},
}


@dataclass(slots=True)
class ActiveRequest:
    """One request, from its acceptance to the last token of its last branch."""

    engine_id: str  # unique in the whole mesh: request id and stream
    request: GenerateRequest
    token_ids: list[int]
    blocks: PromptBlocks
    sampling: SamplingParams
    streams: dict[int, OutStream]  # of the branches that are not over
    span: Span  # decode.request: from acceptance to the last token
    mask: TokenMask | None = None  # what its text must be
    num_cached: int = 0  # prompt tokens in this instance's prefix cache when it came
    waiting_since_ns: int = 0  # when the last wait began whose end is the first token
    waiting_span: str = SPAN_LOCAL_PREFILL
    first_token_ns: int = 0
    num_generated: int = 0  # over all branches
    expiry: asyncio.TimerHandle | None = None  # ends it at its deadline
    error: MeshError | None = None  # why it ended before its last token
    lifecycle: Lifecycle[DecodeState] = field(init=False)  # from `ActiveRequests.add` on

    def enter(self, state: DecodeState) -> None:
        """Move on, unless it is over: whoever works on it may not have heard yet."""
        if not self.lifecycle.is_over:
            self.lifecycle.advance(state)

    def wait(self, span: str) -> None:
        """What ends with the first token begins now, unless something better ends with it."""
        self.waiting_since_ns, self.waiting_span = time.time_ns(), span


class ActiveRequests:
    """All of them, found by engine id or by a branch's stream."""

    def __init__(self, outbox: StreamOutbox) -> None:
        self.tally = Tally(NEXT)
        self.outbox = outbox
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._by_stream: dict[tuple[str, int], tuple[ActiveRequest, int]] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def add(self, active: ActiveRequest) -> None:
        """It is being answered from now on."""
        active.lifecycle = Lifecycle(f"decode {active.engine_id}", NEXT, S.ACCEPTED, self.tally)
        self._none.clear()
        self._by_engine_id[active.engine_id] = active
        for branch, stream in active.streams.items():
            self._by_stream[stream.reply_to, stream.stream_id] = active, branch

    def find(self, engine_id: str) -> ActiveRequest | None:
        """By engine id."""
        return self._by_engine_id.get(engine_id)

    def of_stream(self, reply_to: str, stream_id: int) -> tuple[ActiveRequest, int] | None:
        """The request of a stream that is not over, and which of its branches that is."""
        return self._by_stream.get((reply_to, stream_id))

    def of_frontend(self, reply_to: str) -> list[ActiveRequest]:
        """All of one frontend."""
        return [active for active in self._by_engine_id.values() if active.request.reply_to == reply_to]

    def everyone(self) -> list[ActiveRequest]:
        """All, in order of arrival."""
        return list(self._by_engine_id.values())

    async def drained(self) -> None:
        """Wait until every request is answered."""
        await self._none.wait()

    def emit(self, output: TokenOutput) -> None:
        """Send what a step made for one branch; its last tokens end it, and with the last branch the request."""
        active = self._by_engine_id.get(output.request_id)
        if active is None or (stream := active.streams.get(output.branch)) is None:
            return
        token_ids = output.token_ids
        active.num_generated += len(token_ids)
        if output.finish is None and output.logprobs is None and active.first_token_ns:  # as good as always
            self.outbox.put_tokens(stream, token_ids)
            return
        sent_ns = self._first_token(active) if not active.first_token_ns else 0
        finish = None if output.finish is None else str(output.finish)
        item = stream.tokens(
            token_ids,
            finish,
            output.num_cached_tokens if sent_ns else 0,
            sent_ns,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        self.outbox.put(stream, item)
        if finish is not None:
            self.drop(active, output.branch)

    def drop(self, active: ActiveRequest, branch: int) -> None:
        """One branch is over, the others go on; without any the request is over too."""
        stream = active.streams.pop(branch)
        del self._by_stream[stream.reply_to, stream.stream_id]
        if not active.streams:
            active.enter(S.DONE)
            self._end(active)

    def fail(self, active: ActiveRequest, error: MeshError) -> None:
        """Tell the frontend why there will be no more tokens; one that is over already needs no telling."""
        if self._by_engine_id.get(active.engine_id) is not active:
            return
        active.error = error
        mark_outcome(active.span, error)
        for stream in active.streams.values():
            self.outbox.put(stream, stream.error(error))
            del self._by_stream[stream.reply_to, stream.stream_id]
        active.enter(S.FAILED)
        self._end(active)

    def _end(self, active: ActiveRequest) -> None:
        del self._by_engine_id[active.engine_id]
        if active.expiry is not None:
            active.expiry.cancel()
        if not self._by_engine_id:
            self._none.set()
        if active.first_token_ns:
            record_span(
                "decode.generate",
                active.first_token_ns,
                parent=active.span,
                attributes={"kvmesh.generated_tokens": active.num_generated},
            )
        active.span.end()

    def _first_token(self, active: ActiveRequest) -> int:
        active.first_token_ns = time.time_ns()
        active.enter(S.RUNNING)
        record_span(active.waiting_span, active.waiting_since_ns, active.first_token_ns, parent=active.span)
        return active.first_token_ns
