"""A frontend's side of token streams: frames arrive from decode instances, and their items are dealt to the readers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from nats.aio.msg import Msg

from components.aio import Failure, background
from components.errors import DecodeLost, FramesLost, InvariantBroken, MalformedMessage, MeshError
from components.messaging.arrivals import LOOK_S, Arrivals
from components.messaging.bus import Bus
from components.messaging.refusals import DUPLICATE, GAP, STRANGER, Refusals
from components.wire.generate import (
    FramesResent,
    OtherFrameVersion,
    ResendFrames,
    StreamItem,
    TokenFrame,
    num_numbers,
    unpack_frame,
)
from components.wire.refused import raised

log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 2.0

Listener = Callable[
    [list[StreamItem]], bool
]  # returns whether it has taken them; what it does not take the reader gets


class InStream:
    """One stream as its reader sees it."""

    def __init__(self, stream_id: int, instance_id: str, epoch: str, refusals: Refusals | None = None) -> None:
        self.stream_id = stream_id
        self.instance_id = instance_id
        self.epoch = epoch
        self._refusals = refusals or Refusals()
        self._items: list[StreamItem] = []
        self._error: MeshError | None = None
        self.failure = Failure()  # for whoever waits for something else about this stream
        self.listener: Listener | None = None  # is shown first what comes while the reader waits
        self._next_seq = 0
        self._reader: asyncio.Future[None] | None = None  # waits for an item, or for the end

    def put(self, item: StreamItem) -> bool:
        """An item arrived. A number seen before is a duplicate and dropped; a missing one ends the stream.

        Returns: whether the reader waits, and this is the first item for it: `deal` when all that has come is here.
        """
        if item.seq < self._next_seq:
            self._refusals.count("tokens", DUPLICATE)
            return False
        if item.seq > self._next_seq:
            self._refusals.count("tokens", GAP)
            self.fail(FramesLost(f"tokens {self._next_seq} to {item.seq - 1} of the stream are missing"))
            return False
        self._next_seq += num_numbers(item.token_ids)
        self._items.append(item)
        return self._reader is not None and len(self._items) == 1

    def deal(self) -> None:
        """Give what has come to the listener, or wake the reader if that does not take it."""
        if self._reader is None or self._reader.done():
            return
        if self.listener is None:
            self._wake()
            return
        try:
            taken = self.listener(self._items)
        except Exception as exc:  # noqa: BLE001 - it is this stream's alone: others have items in the same frame
            self._items = []
            self.fail(exc if isinstance(exc, MeshError) else _broken(exc))
            return
        if taken:
            self._items = []
        else:
            self._wake()

    def fail(self, error: MeshError) -> None:
        """The stream ends here; items that arrived before are still read."""
        self._error = self._error or error
        self.failure.tell(error)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def next(self) -> list[StreamItem]:
        """Everything that has arrived, at least one item. Raises: what ended the stream, once all items are read.

        For one reader.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        items, self._items = self._items, []
        error = items[-1].error
        if error is not None:
            items.pop()
            self.fail(raised(error))
            return items or await self.next()
        return items


@dataclass(slots=True)
class _Source:
    """One decode instance: its frames, and the streams that they are for."""

    arrivals: Arrivals
    streams: dict[int, InStream] = field(default_factory=dict)


class StreamInbox:
    """All streams of one frontend; they share one NATS subject."""

    def __init__(
        self,
        subject: str,
        resend: Callable[[str, int], Awaitable[FramesResent]],
        refusals: Refusals | None = None,
        together: AbstractContextManager[object] | None = None,
    ) -> None:
        """Read the frames that come on `subject`.

        Args:
            subject: of this frontend.
            resend: asks an instance to send its frames again, from a number on.
            refusals: count what is dropped.
            together: within it items are dealt to their readers, those of all frames that came at once.
        """
        self.subject = subject
        self._resend = resend
        self._refusals = refusals or Refusals()
        self._together = together or nullcontext()
        self._waiting: list[InStream] = []  # streams with items to deal
        self._sources: dict[str, _Source] = {}  # by instance id
        self._ids = count()

    def __len__(self) -> int:
        """Open streams."""
        return sum(len(source.streams) for source in self._sources.values())

    def open(self, instance_id: str, epoch: str) -> InStream:
        """A stream to read from this instance; its id goes into the request.

        Ids count up: those of streams that are opened one right after another follow each other.
        """
        source = self._source(instance_id)
        stream = InStream(next(self._ids), instance_id, epoch, self._refusals)
        source.streams[stream.stream_id] = stream
        source.arrivals.opened()
        return stream

    def close(self, stream: InStream) -> None:
        """Nobody reads it any more: late items are dropped."""
        source = self._sources.get(stream.instance_id)
        if source is not None and source.streams.pop(stream.stream_id, None) is not None:
            source.arrivals.is_wanted = bool(source.streams)

    def fail_instance(self, instance_id: str, error: MeshError) -> None:
        """The instance is gone or silent: its streams end."""
        source = self._sources.get(instance_id)
        if source is not None:
            for stream in list(source.streams.values()):
                stream.fail(error)

    def forget_instance(self, instance_id: str) -> None:
        """The instance has ended: no frame of it will come any more."""
        source = self._sources.pop(instance_id, None)
        if source is not None:
            source.arrivals.stop()

    async def receive(self, message: Msg) -> None:
        """A frame arrived."""
        try:
            frame = unpack_frame(message.data)
        except OtherFrameVersion as exc:  # its streams would wait for ever
            self._refusals.count("tokens", exc)
            log.warning("frame refused", extra={"cause": exc.message})
            self.fail_instance(exc.instance_id, DecodeLost(exc.message))
            return
        except MalformedMessage as exc:
            self._refusals.count("tokens", exc)
            log.warning("frame refused", extra={"cause": exc.message})
            return
        source = self._sources.get(frame.instance_id)
        if source is None:
            self._refusals.count("tokens", STRANGER)
        elif not source.arrivals.arrived(frame):
            self._refusals.count("tokens", DUPLICATE)

    async def look(self) -> None:
        """Ask quiet instances whether frames were lost, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            for source in list(self._sources.values()):
                source.arrivals.look()

    def stop(self) -> None:
        """Ask for no more frames."""
        for source in self._sources.values():
            source.arrivals.stop()

    def _source(self, instance_id: str) -> _Source:
        source = self._sources.get(instance_id)
        if source is None:
            arrivals = Arrivals(
                instance_id,
                self._put,
                partial(self.fail_instance, instance_id),
                partial(self._resend, instance_id),
            )
            source = self._sources[instance_id] = _Source(arrivals)
        return source

    def _put(self, frame: TokenFrame) -> None:
        """Give the items of a frame, whose turn it is, to their streams."""
        streams, waiting = self._sources[frame.instance_id].streams, self._waiting
        is_first = not waiting
        for item in frame.items:
            stream = streams.get(item.stream_id)  # None: closed, and its last items were on their way
            if stream is not None and stream.put(item):
                waiting.append(stream)
        if is_first and waiting:
            asyncio.get_running_loop().call_soon(self._deal)

    def _deal(self) -> None:
        waiting, self._waiting = self._waiting, []
        with self._together:
            for stream in waiting:
                stream.deal()


def _broken(cause: Exception) -> InvariantBroken:
    """What ended a stream, where only a defect of ours can."""
    error = InvariantBroken(f"a stream's listener: {cause}")
    error.__cause__ = cause
    return error


@asynccontextmanager
async def open_inbox(
    bus: Bus, subject: str, together: AbstractContextManager[object] | None = None
) -> AsyncIterator[StreamInbox]:
    """An inbox that receives while inside. `subject` is `<namespace>.frontend.<instance id>.tokens`."""
    namespace = subject.partition(".")[0]

    async def resend(instance_id: str, first: int) -> FramesResent:
        asking = ResendFrames(reply_to=subject, first=first)
        return await bus.call(f"{namespace}.decode.{instance_id}.resend", asking, FramesResent, timeout_s=ASK_TIMEOUT_S)

    inbox = StreamInbox(subject, resend, bus.refusals, together)
    async with bus.subscription(subject, inbox.receive), background(inbox.look(), "look-for-frames"):
        try:
            yield inbox
        finally:
            inbox.stop()
