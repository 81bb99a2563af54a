"""One prompt on its way: computed by the engine, sent by the sender, released when nothing writes any more."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.trace import Span

from components.aio import Failure
from components.errors import DeadlineExceeded, InvariantBroken, MeshError
from components.kv_transfer.sender import Sender
from components.messaging.deadline import remaining_s
from components.telemetry.spans import record_span
from components.wire.prefill import PrefillRequest
from components.wire.rooms import RoomOpened
from engine.ports import Computed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillJob:
    """What this instance holds for one request of decode."""

    request: PrefillRequest
    sender: Sender
    num_tokens: int  # of the whole prompt
    span: Span  # prefill.request: from acceptance to the last byte
    submitted_ns: int
    step_s: Callable[[], float]  # duration of the engine's last step
    room: RoomOpened | None = None  # the prompt is computing already while the room is being opened
    task: asyncio.Task[None] | None = None
    failure: Failure = field(default_factory=Failure)
    _started_ns: int = 0

    def computed(self, event: Computed) -> None:
        """The engine has finished a chunk."""
        now_ns = time.time_ns()
        if not self._started_ns:
            self._started_ns = max(self.submitted_ns, now_ns - int(self.step_s() * 1e9))
        if event.first_token is None:
            self.sender.computed(event.pages, event.num_computed)
            return
        parent = trace.set_span_in_context(self.span)
        record_span("prefill.queue", self.submitted_ns, self._started_ns, parent=parent)
        record_span(
            "prefill.compute",
            self._started_ns,
            now_ns,
            parent=parent,
            attributes={"kvmesh.prompt_tokens": event.num_computed, "kvmesh.cached_tokens": event.num_cached_tokens},
        )
        self.sender.completed(event.pages, event.first_token, event.num_cached_tokens)

    async def run(self, close_room: Callable[[MeshError | None], Awaitable[None]]) -> bool:
        """Send until done; the room hears how it ended. Returns, when no write is in flight, whether all was sent."""
        outcome: MeshError | None = None
        with trace.use_span(self.span, end_on_exit=True):
            try:
                async with asyncio.timeout(remaining_s(self.request.deadline_unix_ms)):
                    await self.failure.unless(self.sender.run())
            except TimeoutError:
                outcome = DeadlineExceeded("decode did not offer its pages, or the transfer did not end, in time")
            except MeshError as exc:
                outcome = exc
            except Exception as exc:  # the edge of one request
                log.exception("transfer failed", extra={"request": self.request.request_id})
                outcome = InvariantBroken(f"transfer failed: {type(exc).__name__}")
            if outcome is not None:
                self.span.set_status(trace.Status(trace.StatusCode.ERROR, outcome.message))
                log.warning("transfer failed", extra={"request": self.request.request_id, "cause": outcome.message})
            await close_room(outcome)
            return outcome is None
