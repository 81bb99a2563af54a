"""Decode's side of token streams: sends numbered frames to each frontend, and keeps them for a while.

NATS delivers at most once, so a frontend may request lost frames.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Self

from components.aio import background
from components.errors import MeshError, MessageTooLarge
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.wire.generate import FramesResent, ResendFrames, StreamItem, TokenFrame, num_seqs
from components.wire.logprobs import TokenLogprobs
from components.wire.refused import refusal

log = logging.getLogger(__name__)

KEPT_S: Final = 60.0  # a frame is kept
KEPT_BYTES: Final = 64 << 20  # of all kept frames
RESENT_BYTES: Final = 4 << 20  # in answer to one call
PROBE_S: Final = 1.0  # between probes: frames with a reply subject, where NATS reports a missing listener
GONE_AFTER_S: Final = 6.0  # without a listener; longer than a reconnect
REPORT_EXPIRY_S: Final = 60.0  # an older report of no listener is ignored: the frontend may have listened since
QUICK_INTERVALS: Final = 4  # between frames of a stream that gets several tokens in one interval


class OutStream:
    __slots__ = ("gathered", "last_sent_s", "next_seq", "reply_to", "stream_id")

    def __init__(self, reply_to: str, stream_id: int) -> None:
        self.reply_to = reply_to
        self.stream_id = stream_id
        self.gathered: list[int] = []  # unsent tokens, the stream's latest
        self.last_sent_s = 0.0  # monotonic
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
        return StreamItem(
            self.stream_id,
            self._take(num_seqs(token_ids)),
            token_ids,
            finish,
            None,
            num_cached_tokens,
            sent_unix_ns,
            logprobs,
            prompt_logprobs,
        )

    def error(self, error: MeshError) -> StreamItem:
        return StreamItem(self.stream_id, self._take(1), [], None, refusal(error))

    def gather(self, token_ids: Sequence[int]) -> None:
        self.next_seq += len(token_ids)
        self.gathered += token_ids

    def move_gathered(self, until_seq: int, frame: TokenFrame) -> None:
        """Move the gathered tokens, numbered up to `until_seq`, to `frame`."""
        token_ids, self.gathered = self.gathered, []
        frame.add_tokens(self.stream_id, until_seq - len(token_ids), token_ids)

    def _take(self, count: int) -> int:
        seq = self.next_seq
        self.next_seq += count
        return seq


class _Lane:
    __slots__ = ("frames", "is_probing", "no_listener_since_s", "oldest", "probed_s", "reply_to")

    def __init__(self, reply_to: str) -> None:
        self.reply_to = reply_to
        self.oldest = 0  # number of the first kept frame
        self.frames: deque[bytes] = deque()
        self.probed_s = 0.0  # monotonic; last probe
        self.is_probing = False  # the last probe had a listener, as far as reported
        self.no_listener_since_s: float | None = None

    @property
    def next(self) -> int:
        return self.oldest + len(self.frames)


class SentFrames:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._order: deque[tuple[float, _Lane]] = deque()  # oldest first
        self._bytes = 0

    def lane(self, reply_to: str) -> _Lane:
        """A frontend's lane, whose numbers never restart within this process."""
        lane = self._lanes.get(reply_to)
        if lane is None:
            lane = self._lanes[reply_to] = _Lane(reply_to)
        return lane

    def keep(self, lane: _Lane, frame: bytes) -> None:
        now = self._clock()
        lane.frames.append(frame)
        self._order.append((now, lane))
        self._bytes += len(frame)
        while self._order[0][0] < now - KEPT_S or (self._bytes > KEPT_BYTES and len(self._order) > 1):
            _, oldest = self._order.popleft()
            self._bytes -= len(oldest.frames.popleft())
            oldest.oldest += 1


class StreamOutbox:
    """Sends frames: at once after a pause, else every `interval_s`, as a frame costs two context switches."""

    def __init__(
        self, bus: Bus, instance_id: str, epoch: Callable[[], str], step: Callable[[], int], interval_s: float = 0.0
    ) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._epoch = epoch
        self._step = step
        self._interval_s = interval_s
        self._gathering: list[OutStream] = []  # with unsent tokens; may repeat
        self._frames: dict[str, list[TokenFrame]] = {}  # by frontend
        self._sent = SentFrames()
        self._on_gone: list[Callable[[str], None]] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Leaving the context waits up to 2 s for the last frames."""
        async with background(self.run(), "stream-outbox"):
            try:
                yield self
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        await self.flushed()

    def put(self, stream: OutStream, item: StreamItem) -> None:
        frames = self._frames_to(stream.reply_to)
        if stream.gathered:
            stream.move_gathered(item.seq, frames[-1])
        stream.last_sent_s = time.monotonic()
        if item.prompt_logprobs is None:
            frames[-1].add(item)
        else:  # alone: NATS may refuse a large frame, which ends all its streams
            frames += TokenFrame(), TokenFrame()
            frames[-2].add(item)
        self._begin()

    def put_tokens(self, stream: OutStream, token_ids: Sequence[int]) -> None:
        if not stream.gathered:
            self._gathering.append(stream)
            self._begin()
        stream.gather(token_ids)

    def on_gone(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reply_to)` when a frontend has had no listener for GONE_AFTER_S."""
        self._on_gone.append(callback)

    def endpoint(self) -> Endpoint:
        return Endpoint("resend", ResendFrames, self.resend)

    async def resend(self, request: ResendFrames) -> FramesResent:
        lane = self._sent.lane(request.reply_to)
        number = max(request.first, lane.oldest)
        sent = 0
        while number < lane.next and sent < RESENT_BYTES:
            frame = lane.frames[number - lane.oldest]
            await self._bus.publish_bytes(lane.reply_to, frame)
            sent += len(frame)
            number = max(number + 1, lane.oldest)
        return FramesResent(oldest=lane.oldest, next=number, made=lane.next)

    async def flushed(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
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
        self._idle.clear()
        self._wake.set()

    def _due(self, now_s: float) -> dict[str, list[TokenFrame]]:
        """The frames to send now. A quick stream gathers more tokens first."""
        gathering, self._gathering = self._gathering, []
        quick_until_s = now_s - QUICK_INTERVALS * self._interval_s
        for stream in gathering:
            if len(stream.gathered) > 1 and stream.last_sent_s > quick_until_s:
                self._gathering.append(stream)
            elif stream.gathered:
                stream.move_gathered(stream.next_seq, self._frames_to(stream.reply_to)[-1])
                stream.last_sent_s = now_s
        frames, self._frames = self._frames, {}
        return frames

    def _frames_to(self, reply_to: str) -> list[TokenFrame]:
        frames = self._frames.get(reply_to)
        if frames is None:
            frames = self._frames[reply_to] = [TokenFrame()]
        return frames

    async def _send(self, reply_to: str, frame: TokenFrame) -> None:
        lane = self._sent.lane(reply_to)
        packed = self._packed(frame, lane.next)
        try:
            self._bus.check_size(reply_to, packed)
        except MessageTooLarge as exc:  # it can never be sent, so its streams end
            packed = self._packed(frame.failed(exc), lane.next)
        self._sent.keep(lane, packed)
        try:
            await self._bus.publish_bytes(reply_to, packed, self._probe(lane))
        except MeshError as exc:
            log.warning(
                "frame not sent, the frontend must request it", extra={"reason": exc.message, "items": len(frame)}
            )

    def _packed(self, frame: TokenFrame, number: int) -> bytes:
        frame.instance_id, frame.epoch, frame.step, frame.number = (
            self._instance_id,
            self._epoch(),
            self._step(),
            number,
        )
        return frame.pack()

    def _probe(self, lane: _Lane) -> str:
        """The reply subject on which NATS reports a missing listener; "" if it is too early."""
        now = time.monotonic()
        if now - lane.probed_s < PROBE_S:
            return ""
        if lane.is_probing or now - lane.probed_s > REPORT_EXPIRY_S:
            lane.no_listener_since_s = None
        lane.probed_s, lane.is_probing = now, True

        def no_listener() -> None:
            lane.is_probing = False
            if lane.no_listener_since_s is None:
                lane.no_listener_since_s = now
            elif time.monotonic() - lane.no_listener_since_s > GONE_AFTER_S:
                for callback in self._on_gone:
                    callback(lane.reply_to)

        return self._bus.on_no_responders(lane.reply_to, no_listener)
