"""A frontend's side of token streams: passes frames' items to the readers of their streams."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, Protocol

from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from components.aio import Failure, background
from components.errors import DecodeLost, FramesLost, InvariantBroken, MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.frame_order import CHECK_INTERVAL_S, FrameCounts, FrameOrder
from components.messaging.refusals import DUPLICATE, GAP, STRANGER, Refusals
from components.telemetry.on_demand import OnDemand
from components.wire.generate import (
    FramesResent,
    OtherFrameVersion,
    ResendFrames,
    StreamItem,
    TokenFrame,
    num_seqs,
    unpack_frame,
)
from components.wire.refused import raised

log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 2.0
CANCEL_AGAIN_AFTER_S: Final = 1.0  # if a cancelled stream still sends


class Reader(Protocol):
    def add_tokens(self, item: StreamItem) -> None:
        """Take the items of one turn of the event loop, joined into one."""

    def fail(self, error: MeshError) -> None:
        """Called once, after the last item."""


class InStream:
    """One stream from a decode instance. Items wait for `start`."""

    def __init__(self, stream_id: int, instance_id: str, epoch: str, refusals: Refusals) -> None:
        self.stream_id = stream_id
        self.instance_id = instance_id
        self.epoch = epoch
        self._refusals = refusals
        self._items: list[StreamItem] = []
        self._error: MeshError | None = None
        self.failure = Failure()  # for a caller that waits for another event about this stream
        self._reader: Reader | None = None
        self._next_seq = 0

    def start(self, reader: Reader) -> None:
        self._reader = reader
        self.deliver()
        if self._error is not None:
            self._end(self._error)

    def put(self, item: StreamItem) -> bool:
        """Add an item. A duplicate is dropped; a gap fails the stream.

        Returns: whether the caller must `deliver`: there is a reader, and this is its first new item.
        """
        if item.seq < self._next_seq:
            self._refusals.count("tokens", DUPLICATE)
            return False
        if item.seq > self._next_seq:
            self._refusals.count("tokens", GAP)
            self.fail(FramesLost(f"tokens {self._next_seq} to {item.seq - 1} of the stream are missing"))
            return False
        self._next_seq += num_seqs(item.token_ids)
        self._items.append(item)
        return self._reader is not None and len(self._items) == 1

    def deliver(self) -> None:
        items, reader = self._items, self._reader
        if reader is None or not items:
            return
        self._items = []
        item = items[0] if len(items) == 1 else _joined(items)
        try:
            if item.token_ids or item.error is None:
                reader.add_tokens(item)
        except Exception as exc:  # noqa: BLE001 - it ends this stream alone: the frame has items of others
            self.fail(exc if isinstance(exc, MeshError) else _broken(exc))
            return
        if item.error is not None:
            self.fail(raised(item.error))

    def fail(self, error: MeshError) -> None:
        """End the stream, after the items that have arrived."""
        if self._error is not None:
            return
        self.deliver()
        self._error = self._error or error
        self.failure.report(self._error)
        self._end(self._error)

    def stop(self) -> None:
        self._reader = None
        self._items = []

    def _end(self, error: MeshError) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.fail(error)


@dataclass(slots=True)
class _Source:
    epoch: str
    order: FrameOrder
    streams: dict[int, InStream] = field(default_factory=dict)
    unwanted: dict[int, float] = field(default_factory=dict)  # since when closed streams still send tokens


class StreamInbox:
    """All streams of one frontend, on one NATS subject.

    Args:
        subject: of this frontend's frames.
        resend: requests an instance's frames again, from a number on.
        refusals: counts dropped frames and items.
        together: a context that is open while the items of one turn of the event loop are passed on.
    """

    def __init__(
        self,
        subject: str,
        resend: Callable[[str, int], Awaitable[FramesResent]],
        refusals: Refusals | None = None,
        together: AbstractContextManager[object] | None = None,
    ) -> None:
        self.subject = subject
        self._resend = resend
        self.counts = FrameCounts()
        self._refusals = refusals or Refusals()
        self._together = together or nullcontext()
        self._waiting: list[InStream] = []
        self._sources: dict[str, _Source] = {}  # by instance id
        self._ids = count()
        self._cancel: Callable[[str, int], None] = lambda instance_id, stream_id: None

    def on_unwanted(self, cancel: Callable[[str, int], None]) -> None:
        """`cancel` gets the instance and the id of a closed stream that still sends tokens."""
        self._cancel = cancel

    def show(self, metrics: CollectorRegistry) -> None:
        shown, counts = OnDemand(metrics), self.counts
        shown.counter(
            "kvmesh_frames_lost",
            "Token frames that decode could not send again: their streams moved.",
            lambda: counts.lost,
        )
        shown.counter(
            "kvmesh_frame_requests",
            "Calls for token frames: after a gap in their numbers, or to check on a quiet instance.",
            lambda: {("gap",): counts.gaps, ("check",): counts.checks},
            ["why"],
        )

    def __len__(self) -> int:
        return sum(len(source.streams) for source in self._sources.values())

    def open(self, instance_id: str, epoch: str) -> InStream:
        """Calls in a row return consecutive ids."""
        source = self._source(instance_id, epoch)
        stream = InStream(next(self._ids), instance_id, epoch, self._refusals)
        source.streams[stream.stream_id] = stream
        source.order.opened()
        return stream

    def close(self, stream: InStream) -> None:
        stream.stop()
        source = self._sources.get(stream.instance_id)
        if source is not None and source.streams.pop(stream.stream_id, None) is not None:
            source.order.is_wanted = bool(source.streams)

    def fail_instance(self, instance_id: str, error: MeshError) -> None:
        source = self._sources.get(instance_id)
        if source is not None:
            source.unwanted.clear()
            for stream in list(source.streams.values()):
                stream.fail(error)

    def forget_instance(self, instance_id: str) -> None:
        source = self._sources.pop(instance_id, None)
        if source is not None:
            source.order.stop()

    async def receive(self, message: Msg) -> None:
        try:
            frame = unpack_frame(message.data)
        except OtherFrameVersion as exc:  # move its streams, which would otherwise wait until their deadline
            self._refusals.count("tokens", exc)
            log.warning("tokens of another release refused, their streams move", extra={"cause": exc.message})
            self.fail_instance(exc.instance_id, DecodeLost(exc.message))
            return
        except MalformedMessage as exc:
            self._refusals.count("tokens", exc)
            log.warning("malformed tokens refused", extra={"cause": exc.message})
            return
        source = self._sources.get(frame.instance_id)
        if source is None or source.epoch != frame.epoch:
            self._refusals.count("tokens", STRANGER)
        elif not source.order.arrived(frame):
            self._refusals.count("tokens", DUPLICATE)

    async def query_quiet_sources(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for source in list(self._sources.values()):
                source.order.repair_if_quiet()

    def stop(self) -> None:
        for source in self._sources.values():
            source.order.stop()

    def _source(self, instance_id: str, epoch: str) -> _Source:
        source = self._sources.get(instance_id)
        if source is not None and source.epoch != epoch:  # a restarted process: its frames start at 0
            self.fail_instance(instance_id, DecodeLost(f"decode {instance_id}: registered anew"))
            self.forget_instance(instance_id)
            source = None
        if source is None:
            order = FrameOrder(
                instance_id,
                self._put,
                partial(self.fail_instance, instance_id),
                partial(self._resend, instance_id),
                self.counts,
            )
            source = self._sources[instance_id] = _Source(epoch, order)
        return source

    def _put(self, frame: TokenFrame) -> None:
        source, waiting = self._sources[frame.instance_id], self._waiting
        is_first = not waiting
        for item in frame.items:
            stream = source.streams.get(item.stream_id)
            if stream is None:  # closed before its last items arrived
                self._put_unwanted(source, frame.instance_id, item)
            elif stream.put(item):
                waiting.append(stream)
        if is_first and waiting:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _put_unwanted(self, source: _Source, instance_id: str, item: StreamItem) -> None:
        """Cancel a closed stream again, because NATS may have lost the cancellation."""
        if item.finish is not None or item.error is not None:
            source.unwanted.pop(item.stream_id, None)
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - source.unwanted.setdefault(item.stream_id, now_s) > CANCEL_AGAIN_AFTER_S:
            source.unwanted[item.stream_id] = now_s
            self._cancel(instance_id, item.stream_id)

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        with self._together:
            for stream in waiting:
                stream.deliver()


def _joined(items: Sequence[StreamItem]) -> StreamItem:
    head, last = items[0], items[-1]
    return head._replace(
        token_ids=[token_id for item in items for token_id in item.token_ids],
        finish=last.finish,
        error=last.error,
        logprobs=None if head.logprobs is None else [entry for item in items for entry in item.logprobs or ()],
        draft_counts=next((item.draft_counts for item in reversed(items) if item.draft_counts is not None), None),
    )


def _broken(cause: Exception) -> InvariantBroken:
    """A bug in our own reader must not move the stream."""
    error = InvariantBroken(f"a stream's reader: {cause}")
    error.__cause__ = cause
    return error


@asynccontextmanager
async def open_inbox(
    bus: Bus, subject: str, together: AbstractContextManager[object] | None = None
) -> AsyncIterator[StreamInbox]:
    """`subject` begins with the namespace: `<namespace>.tokens.<NATS name>.<instance id>-<epoch>`."""
    namespace = subject.partition(".")[0]

    async def resend(instance_id: str, first: int) -> FramesResent:
        asking = ResendFrames(reply_to=subject, first=first)
        return await bus.call(f"{namespace}.decode.{instance_id}.resend", asking, FramesResent, timeout_s=ASK_TIMEOUT_S)

    inbox = StreamInbox(subject, resend, bus.refusals, together)
    async with bus.subscription(subject, inbox.receive), background(inbox.query_quiet_sources(), "query-quiet-sources"):
        try:
            yield inbox
        finally:
            inbox.stop()
