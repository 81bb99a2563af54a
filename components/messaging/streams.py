"""Token streams: decode's outbox gathers them into frames, one for each frontend, whose inbox deals them out again.

A stream's tokens are numbered, because a NATS subscription past its limits drops messages in silence: a gap ends the stream
with DecodeLost, and whoever reads it goes on elsewhere from the tokens it has.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from itertools import count
from typing import Final

from nats.aio.msg import Msg

from components.aio import Failure, background
from components.errors import DecodeLost, InvariantBroken, MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.refusals import DUPLICATE, GAP, STRANGER, Refusals
from components.wire.generate import FrameDraft, OtherFrameVersion, StreamItem, num_numbers, unpack_frame
from components.wire.logprobs import TokenLogprobs
from components.wire.refused import raised, refusal

log = logging.getLogger(__name__)

QUICK_INTERVALS: Final = 4  # in which a stream leaves once, when it makes more than a token in each


class OutStream:
    """One stream as its sender sees it."""

    __slots__ = ("gathered", "last_left_s", "next_seq", "reply_to", "stream_id")

    def __init__(self, reply_to: str, stream_id: int) -> None:
        self.reply_to = reply_to
        self.stream_id = stream_id
        self.gathered: list[int] = []  # tokens that wait to leave: the last numbers that were taken
        self.last_left_s = 0.0  # when something did
        self.next_seq = 0

    def tokens(
        self,
        token_ids: list[int],
        finish: str | None = None,
        num_cached_tokens: int = 0,
        sent_unix_ns: int = 0,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> StreamItem:
        """The next item of this stream."""
        return StreamItem(
            self.stream_id,
            self._take(num_numbers(token_ids)),
            token_ids,
            finish,
            None,
            num_cached_tokens,
            sent_unix_ns,
            logprobs,
            prompt_logprobs,
        )

    def error(self, error: MeshError) -> StreamItem:
        """The last item of this stream: it ends here, and why."""
        return StreamItem(self.stream_id, self._take(1), [], None, refusal(error))

    def gather(self, token_ids: Sequence[int]) -> None:
        """Tokens with nothing beside them, which leave later."""
        self.next_seq += len(token_ids)
        self.gathered += token_ids

    def leave(self, until_seq: int, frame: FrameDraft) -> None:
        """What has gathered goes into the frame; its numbers end before `until_seq`."""
        token_ids, self.gathered = self.gathered, []
        frame.tokens(self.stream_id, until_seq - len(token_ids), token_ids)

    def _take(self, count: int) -> int:
        """The first of so many next numbers."""
        seq = self.next_seq
        self.next_seq += count
        return seq


class StreamOutbox:
    """Collects items and sends them as frames.

    What comes after a rest leaves at once, what follows gathers: tokens that are made faster than anybody reads them are
    not worth a frame, an event and two switches of processes each.
    """

    def __init__(
        self, bus: Bus, instance_id: str, epoch: Callable[[], str], step: Callable[[], int], interval_s: float = 0.0
    ) -> None:
        """`interval_s`: from one sending to the next, at least."""
        self._bus = bus
        self._instance_id = instance_id
        self._epoch = epoch
        self._step = step
        self._interval_s = interval_s
        self._gathering: list[OutStream] = []  # those with tokens that wait, some of them twice
        self._frames: dict[str, list[FrameDraft]] = {}  # of each frontend, what leaves next
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, stream: OutStream, item: StreamItem) -> None:
        """Queue an item for the next frame to its frontend."""
        frames = self._frames_to(stream.reply_to)
        if stream.gathered:
            stream.leave(item.seq, frames[-1])
        stream.last_left_s = time.monotonic()
        frames[-1].add(item)
        if item.prompt_logprobs is not None:  # those of two long prompts may be more than NATS carries
            frames.append(FrameDraft())
        self._begin()

    def put_tokens(self, stream: OutStream, token_ids: Sequence[int]) -> None:
        """Queue tokens with nothing beside them, which are nearly all that there is to send."""
        if not stream.gathered:
            self._gathering.append(stream)
            self._begin()
        stream.gather(token_ids)

    async def flushed(self) -> None:
        """Wait until everything queued was handed to NATS."""
        await self._idle.wait()

    async def run(self) -> None:
        """Send frames for ever."""
        rests_until_s = 0.0
        while True:
            await self._wake.wait()
            if (rest_s := rests_until_s - time.monotonic()) > 0:
                await asyncio.sleep(rest_s)
            now_s = time.monotonic()
            rests_until_s = now_s + self._interval_s
            self._wake.clear()
            for reply_to, frames in self._due(now_s).items():
                for frame in filter(None, frames):
                    await self._send(reply_to, frame)
            if self._gathering:
                self._wake.set()
            elif not self._frames:
                self._idle.set()

    def _begin(self) -> None:
        """There is something to send."""
        self._idle.clear()
        self._wake.set()

    def _due(self, now_s: float) -> dict[str, list[FrameDraft]]:
        """What leaves now, by frontend. A stream that makes tokens quickly waits until more have gathered."""
        gathering, self._gathering = self._gathering, []
        quick_until_s = now_s - QUICK_INTERVALS * self._interval_s
        for stream in gathering:
            if len(stream.gathered) > 1 and stream.last_left_s > quick_until_s:
                self._gathering.append(stream)
            elif stream.gathered:
                stream.leave(stream.next_seq, self._frames_to(stream.reply_to)[-1])
                stream.last_left_s = now_s
        frames, self._frames = self._frames, {}
        return frames

    def _frames_to(self, reply_to: str) -> list[FrameDraft]:
        frames = self._frames.get(reply_to)
        if frames is None:
            frames = self._frames[reply_to] = [FrameDraft()]
        return frames

    async def _send(self, reply_to: str, frame: FrameDraft) -> None:
        try:
            await self._bus.publish_bytes(reply_to, frame.pack(self._instance_id, self._epoch(), self._step()))
        except MeshError as exc:
            # The frontend sees the gap, or our silence, and moves its streams.
            log.warning("frame lost", extra={"reason": exc.message, "items": len(frame)})


@asynccontextmanager
async def open_outbox(
    bus: Bus, instance_id: str, epoch: Callable[[], str], step: Callable[[], int], interval_s: float = 0.0
) -> AsyncIterator[StreamOutbox]:
    """An outbox whose frames leave while inside; leaving sends what is queued."""
    outbox = StreamOutbox(bus, instance_id, epoch, step, interval_s)
    async with background(outbox.run(), "stream-outbox"):
        try:
            yield outbox
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(outbox.flushed(), timeout=2)


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
            self.fail(DecodeLost(f"tokens {self._next_seq} to {item.seq - 1} of the stream are missing"))
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


class StreamInbox:
    """All streams of one frontend; they share one NATS subject."""

    def __init__(
        self, subject: str, refusals: Refusals | None = None, together: AbstractContextManager[object] | None = None
    ) -> None:
        """Within `together` items are dealt to their readers, those of all frames that came at once."""
        self.subject = subject
        self._refusals = refusals or Refusals()
        self._together = together or nullcontext()
        self._waiting: list[InStream] = []  # streams with items to deal
        self._streams: dict[int, InStream] = {}
        self._ids = count()

    def open(self, instance_id: str, epoch: str) -> InStream:
        """A stream to read from this instance; its id goes into the request.

        Ids count up: those of streams that are opened one right after another follow each other.
        """
        stream = InStream(next(self._ids), instance_id, epoch, self._refusals)
        self._streams[stream.stream_id] = stream
        return stream

    def close(self, stream: InStream) -> None:
        """Nobody reads it any more: late items are dropped."""
        self._streams.pop(stream.stream_id, None)

    def fail_instance(self, instance_id: str, error: MeshError) -> None:
        """The instance is gone or silent: its streams end."""
        for stream in self._streams.values():
            if stream.instance_id == instance_id:
                stream.fail(error)

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
        waiting = self._waiting
        is_first = not waiting
        for item in frame.items:
            stream = self._streams.get(item.stream_id)
            if stream is None:
                continue  # closed, and its last items were on their way
            if stream.instance_id != frame.instance_id:
                self._refusals.count("tokens", STRANGER)
            elif stream.put(item):
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
    """An inbox that receives while inside."""
    inbox = StreamInbox(subject, bus.refusals, together)
    async with bus.subscription(subject, inbox.receive):
        yield inbox
