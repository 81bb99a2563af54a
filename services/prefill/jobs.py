"""One prompt on its way: computed by the engine, sent by the sender, released when nothing writes any more."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Final

from opentelemetry.trace import Span

from components.aio import Failure
from components.errors import Cancelled, DeadlineExceeded, InvariantBroken, MeshError
from components.kv_transfer.sender import Sender
from components.lifecycle import Lifecycle
from components.messaging.deadline import now_ms
from components.telemetry.spans import mark_outcome, record_span, use_span
from components.wire.instances import KvEndpoint
from components.wire.prefill import PrefillRequest
from components.wire.rooms import PagesOffered
from engine.ports import Computed

log = logging.getLogger(__name__)


class PrefillState(StrEnum):
    """Life of one prompt here: which queue it stands in. Computing does not wait for decode's pages."""

    BOOTSTRAPPING = auto()  # decode's pages are not known; the prompt is queued or computed meanwhile
    WAITING = auto()  # they are, and the prompt is queued in the engine
    COMPUTING = auto()  # chunks are computed, and leave as they are
    INFLIGHT = auto()  # all is computed; what is left is on its way
    DONE = auto()  # everything has landed, decode was told
    FAILED = auto()  # nothing of it is in flight, and nothing will be


S = PrefillState
NEXT: Final = {
    S.BOOTSTRAPPING: {S.WAITING, S.COMPUTING, S.INFLIGHT, S.FAILED},
    S.WAITING: {S.COMPUTING, S.INFLIGHT, S.FAILED},
    S.COMPUTING: {S.INFLIGHT, S.FAILED},
    S.INFLIGHT: {S.DONE, S.FAILED},
}


@dataclass(slots=True)
class PrefillJob:
    """What this instance holds for one request of decode."""

    request: PrefillRequest
    sender: Sender
    lifecycle: Lifecycle[PrefillState]
    num_tokens: int  # of the whole prompt
    span: Span  # prefill.request: from acceptance to the last byte
    submitted_ns: int
    step_s: Callable[[], float]  # duration of the engine's last step
    offer: PagesOffered | None = None
    task: asyncio.Task[None] = field(init=False)  # what works on it
    failure: Failure = field(default_factory=Failure)
    num_computed: int = 0  # prompt tokens, those that were cached included
    _started_ns: int = 0
    _computed_ns: int = 0

    @property
    def tokens_left(self) -> int:
        """Prompt tokens still to be computed."""
        return self.num_tokens - self.num_computed

    def offered(self, offer: PagesOffered, peer: KvEndpoint) -> None:
        """Decode's pages are known; the same offer again changes nothing."""
        if self.lifecycle.state is not S.BOOTSTRAPPING:
            return
        self.offer = offer
        record_span("prefill.bootstrap", self.submitted_ns, parent=self.span)
        self.sender.offered(offer, peer, self.request.stamp)
        self.lifecycle.advance(S.INFLIGHT if self._computed_ns else S.COMPUTING if self._started_ns else S.WAITING)

    def computed(self, event: Computed) -> None:
        """The engine has finished a chunk."""
        now_ns = time.time_ns()
        self.num_computed = event.num_computed
        if not self._started_ns:
            self._started_ns = max(self.submitted_ns, now_ns - int(self.step_s() * 1e9))
        if event.first_token is not None:
            self._computed_ns = now_ns
        if self.lifecycle.state in (S.WAITING, S.COMPUTING):
            following = S.INFLIGHT if self._computed_ns else S.COMPUTING
            if following is not self.lifecycle.state:
                self.lifecycle.advance(following)
        if event.first_token is None:
            self.sender.computed(event.pages, event.num_computed)
            return
        record_span("prefill.queue", self.submitted_ns, self._started_ns, parent=self.span)
        record_span(
            "prefill.compute",
            self._started_ns,
            now_ns,
            parent=self.span,
            attributes={"kvmesh.prompt_tokens": event.num_computed, "kvmesh.cached_tokens": event.num_cached_tokens},
        )
        self.sender.completed(event.pages, event.first_token, event.num_cached_tokens, event.logprobs)

    async def run(self, work: Coroutine[Any, Any, None]) -> MeshError | None:
        """Send until done, which `work` does. Returns, when no write is in flight, why not all was sent; None: all was."""
        with use_span(self.span, end_on_exit=True):
            outcome = await self._outcome(work)
            if outcome is not None:
                mark_outcome(self.span, outcome)
                facts = {"request": self.request.request_id, "cause": outcome.message}
                if isinstance(outcome, Cancelled):
                    log.debug("cancelled by the client", extra=facts)
                else:
                    log.warning("transfer failed", extra=facts)
            else:
                record_span("prefill.inflight", self._computed_ns)
                self.lifecycle.advance(S.DONE)
            return outcome

    async def _outcome(self, work: Coroutine[Any, Any, None]) -> MeshError | None:
        late = DeadlineExceeded("the transfer did not end before the request's deadline")
        left_s = max(0.0, self.request.deadline_unix_ms - now_ms()) / 1000
        try:
            await self.failure.within(left_s, late, work)
        except MeshError as exc:
            return exc
        except Exception as exc:  # the edge of one request
            log.exception("transfer failed", extra={"request": self.request.request_id})
            return InvariantBroken(f"transfer failed: {type(exc).__name__}")
        return None

    def over(self) -> None:
        """Nothing of it is in flight any more, however it ended."""
        if not self.lifecycle.is_over:
            self.lifecycle.advance(S.FAILED)
