import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from components.errors import BackendUnavailable, Cancelled, DecodeLost, InvariantBroken, MessageTooLarge, QueueFull
from components.messaging.connection import connect_bus
from components.messaging.inbox import InStream, StreamInbox, open_inbox
from components.messaging.outbox import OutStream, StreamOutbox
from components.messaging.refusals import STRANGER
from components.wire.generate import FRAME_VERSION, FramesResent, ResendFrames, StreamItem, unpack_frame
from components.wire.logprobs import TokenLogprobs
from tests.components.messaging.fake_bus import FakeBus
from tests.components.messaging.frames import Message, Numbered, Read, nothing_lost
from tests.components.wire.frames import frame_of
from tests.faults.virtual_loop import run_virtually
from tests.waiting import PATIENCE_S, turns

pytestmark = pytest.mark.anyio
TOLD = TokenLogprobs(-1.0)


@dataclass
class Ends:
    """The sender and the reader of one stream."""

    inbox: StreamInbox = field(default_factory=lambda: StreamInbox("ns.frontend.f.tokens", nothing_lost))

    def __post_init__(self) -> None:
        self.deliver = Numbered(self.inbox).deliver
        self.stream: InStream = self.inbox.open("d", "e")
        self.sender = OutStream(self.inbox.subject, self.stream.stream_id)


async def test_a_reader_gets_everything_that_has_arrived_in_order_as_one_item() -> None:
    ends = Ends()
    await ends.deliver(ends.sender.tokens([1], num_cached_tokens=5, logprobs=[TOLD]))
    await ends.deliver(ends.sender.tokens([2, 3], logprobs=[TOLD] * 2), ends.sender.tokens([4], "length"))
    assert Read(ends.stream).items == [StreamItem(0, 0, [1, 2, 3, 4], "length", None, 5, 0, [TOLD] * 3)]


async def test_what_comes_later_is_pushed_to_the_reader_in_the_next_turn() -> None:
    ends = Ends()
    read = Read(ends.stream)
    for token in (7, 8):
        await ends.deliver(ends.sender.tokens([token]))
        await asyncio.sleep(0)
    assert read.tokens == [[7], [8]]


async def test_a_frame_of_another_version_ends_the_streams_of_its_instance() -> None:
    """It was dropped: the reader waited until its deadline."""
    ends = Ends()
    other = ends.inbox.open("other", "e")
    old = msgpack.unpackb(Numbered(ends.inbox).frame(ends.sender.tokens([1])).data)
    await ends.inbox.receive(Message(msgpack.packb([FRAME_VERSION + 1, *old[1:]])))
    error = Read(ends.stream).error
    assert isinstance(error, DecodeLost)
    assert f"version {FRAME_VERSION + 1} from decode d, this process reads" in str(error)
    sent = OutStream(ends.inbox.subject, other.stream_id)
    await ends.deliver(sent.tokens([7]), instance_id="other")
    assert Read(other).tokens == [[7]]


@pytest.mark.parametrize("starts", ["before", "after"])
async def test_a_gap_ends_the_stream_after_what_came_before_it(starts: str) -> None:
    ends = Ends()
    read = Read(ends.stream) if starts == "before" else None
    one, _, three, four = (ends.sender.tokens([i]) for i in range(4))
    for item in (one, three, four):
        await ends.deliver(item)
    await asyncio.sleep(0)
    read = read or Read(ends.stream)
    assert read.tokens == [[0]]
    assert isinstance(read.error, DecodeLost)
    assert "tokens 1 to 1 of the stream are missing" in str(read.error)


async def test_a_gap_before_any_token_ends_the_stream() -> None:
    ends = Ends()
    read = Read(ends.stream)
    ends.sender.tokens([0])
    await ends.deliver(ends.sender.tokens([1]))
    assert isinstance(read.error, DecodeLost)
    assert not read.items


async def test_a_duplicate_is_dropped() -> None:
    ends = Ends()
    one, two = ends.sender.tokens([1]), ends.sender.tokens([2])
    for item in (one, one, two, one, two):
        await ends.deliver(item)
    assert Read(ends.stream).tokens == [[1, 2]]


async def test_an_error_item_ends_the_stream_with_that_error_after_its_tokens() -> None:
    ends = Ends()
    await ends.deliver(ends.sender.tokens([1]), ends.sender.error(QueueFull("full", retry_after_s=3)))
    read = Read(ends.stream)
    assert read.tokens == [[1]]
    assert isinstance(read.error, QueueFull)
    assert read.error.retry_after_s == 3
    alone = Ends()
    await alone.deliver(alone.sender.error(InvariantBroken("bug")))
    read = Read(alone.stream)
    assert isinstance(read.error, InvariantBroken)
    assert not read.items


async def test_frames_of_another_instance_and_of_closed_streams_are_ignored() -> None:
    ends = Ends()
    read = Read(ends.stream)
    await ends.deliver(ends.sender.tokens([1]), instance_id="stranger")
    await ends.deliver(OutStream("x", 999).tokens([1]))
    await ends.inbox.receive(Message(b"garbage"))
    again = OutStream(ends.inbox.subject, ends.stream.stream_id)
    await ends.deliver(again.tokens([2]))
    await asyncio.sleep(0)
    assert read.tokens == [[2]]
    await ends.deliver(again.tokens([3]))
    ends.inbox.close(ends.stream)
    ends.inbox.close(ends.stream)
    await ends.deliver(again.tokens([4]))
    await asyncio.sleep(0)
    assert read.tokens == [[2]], "nothing is pushed after the close, also not what had arrived"
    assert not len(ends.inbox)


async def test_a_process_that_starts_again_under_its_id_is_read_from_its_first_frame() -> None:
    """Its frames counted as old frames of the earlier process, and were dropped: a request waited until its deadline."""
    ends = Ends()
    read = Read(ends.stream)
    await ends.deliver(ends.sender.tokens([1]), ends.sender.tokens([2]))
    again = ends.inbox.open("d", "anew")
    assert isinstance(read.error, DecodeLost)
    late = Message(frame_of("d", "e", 1, [OutStream("x", again.stream_id).tokens([6])], 0).pack())
    sender, after = OutStream("x", again.stream_id), Read(again)
    for number, token in enumerate((7, 8)):
        await ends.inbox.receive(late)
        await ends.inbox.receive(Message(frame_of("d", "anew", 1, [sender.tokens([token])], number).pack()))
    await asyncio.sleep(0)
    assert after.tokens == [[7, 8]]
    assert ends.inbox._refusals._counts["tokens", STRANGER] == 2
    ends.inbox.close(again)
    ends.inbox.close(ends.stream)
    assert not len(ends.inbox)


async def test_a_lost_instance_ends_its_streams_alone_and_stops_other_waits_for_them() -> None:
    inbox = StreamInbox("s", nothing_lost)
    lost, other = inbox.open("gone", "e"), inbox.open("here", "e")
    waiting = asyncio.create_task(lost.failure.unless(asyncio.sleep(60)))
    await asyncio.sleep(0)
    read, beside = Read(lost), Read(other)
    inbox.fail_instance("gone", DecodeLost("silent"))
    inbox.fail_instance("gone", DecodeLost("reported twice"))
    assert str(read.error) == "silent"
    with pytest.raises(DecodeLost, match="silent"):
        await waiting
    assert beside.error is None


async def test_what_comes_at_once_is_pushed_together() -> None:
    seen: list[Any] = []

    class Together:
        def __enter__(self) -> None:
            seen.append("begin")

        def __exit__(self, *error: object) -> None:
            seen.append("end")

    class Noting(Read):
        def add_tokens(self, item: StreamItem) -> None:
            seen.append(item.token_ids)

    inbox = StreamInbox("s", nothing_lost, together=Together())
    streams = [inbox.open("d", "e") for _ in range(2)]
    senders = [OutStream("s", stream.stream_id) for stream in streams]
    for stream in streams:
        Noting(stream)
    numbered = Numbered(inbox)
    for token in (1, 2):
        await numbered.deliver(*(sender.tokens([token]) for sender in senders))
    assert seen == []
    await asyncio.sleep(0)
    assert seen == ["begin", [1, 2], [1, 2], "end"]


@pytest.mark.parametrize(("cause", "ends_with"), [(QueueFull("full"), QueueFull), (KeyError("bug"), InvariantBroken)])
async def test_a_reader_that_fails_ends_its_stream_alone(cause: Exception, ends_with: type[Exception]) -> None:
    class Failing(Read):
        def add_tokens(self, item: StreamItem) -> None:
            raise cause

    ends = Ends()
    other = ends.inbox.open("d", "e")
    failing, beside = Failing(ends.stream), Read(other)
    await ends.deliver(ends.sender.tokens([1]), OutStream("s", other.stream_id).tokens([2]))
    await asyncio.sleep(0)
    assert isinstance(failing.error, ends_with)
    assert beside.tokens == [[2]]


@pytest.fixture
async def outbox() -> AsyncIterator[tuple[StreamOutbox, FakeBus]]:
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "e", lambda: 5).running() as opened:
        yield opened, bus


async def test_items_of_one_moment_leave_as_one_frame_a_frontend(outbox: tuple[StreamOutbox, FakeBus]) -> None:
    box, bus = outbox
    streams = [OutStream("front-a", 1), OutStream("front-a", 2), OutStream("front-b", 1)]
    for stream in streams:
        box.put(stream, stream.tokens([stream.stream_id]))
    await box.flushed()
    frames = {subject: unpack_frame(data) for subject, data in bus.frames}
    assert len(bus.frames) == 2
    assert [i.stream_id for i in frames["front-a"].items] == [1, 2]
    assert (frames["front-b"].instance_id, frames["front-b"].epoch, frames["front-b"].step) == ("d", "e", 5)


async def test_items_that_come_while_a_frame_leaves_follow_in_the_next(outbox: tuple[StreamOutbox, FakeBus]) -> None:
    box, bus = outbox
    stream = OutStream("front", 1)
    for number in range(20):
        box.put(stream, stream.tokens([number]))
        await asyncio.sleep(0)
    await box.flushed()
    items = [item for _, data in bus.frames for item in unpack_frame(data).items]
    assert [i.seq for i in items] == [i.token_ids[0] for i in items] == list(range(20))


def tokens_by_frame(bus: FakeBus, stream_id: int) -> list[list[int]]:
    frames = [unpack_frame(data).items for _, data in bus.frames]
    of_stream = (
        [token for item in items if item.stream_id == stream_id for token in item.token_ids] for items in frames
    )
    return [tokens for tokens in of_stream if tokens]


def test_a_token_waits_for_an_interval_but_the_first_after_a_rest_leaves_at_once() -> None:
    async def test() -> None:
        await asyncio.sleep(60)  # the virtual clock begins at zero, where a stream seems to have sent just now
        bus = FakeBus()
        stream = OutStream("a", 1)
        async with StreamOutbox(bus, "d", lambda: "e", lambda: 5, interval_s=0.2).running() as box:
            for sent in (1, 2):
                box.put_tokens(stream, [0])
                await asyncio.sleep(0.02)
                assert len(bus.frames) == 2 * sent - 1, "at once"
                box.put_tokens(stream, [1])
                await asyncio.sleep(0.02)
                assert len(bus.frames) == 2 * sent - 1
                await asyncio.sleep(0.5)
                assert len(bus.frames) == 2 * sent
            box.put_tokens(stream, [9])
            await asyncio.sleep(0.02)
            box.put_tokens(stream, [10])
        assert tokens_by_frame(bus, 1) == [[0], [1], [0], [1], [9], [10]], "and leaving sends what is there"

    run_virtually(test)


def test_a_quick_stream_leaves_once_in_some_intervals_and_holds_up_no_other() -> None:
    async def test() -> None:
        await asyncio.sleep(60)  # the virtual clock begins at zero, where a stream seems to have sent just now
        bus, inbox = FakeBus(), StreamInbox("a", nothing_lost)
        readers = inbox.open("d", "e"), inbox.open("d", "e")
        quick, slow = (OutStream("a", reader.stream_id) for reader in readers)
        interval_s = 0.1
        async with StreamOutbox(bus, "d", lambda: "e", lambda: 5, interval_s=interval_s).running() as box:
            # in each interval ten tokens of one stream and one of the other, for 1.5 times as long as the one waits
            for number in range(60):
                if number % 10 == 0:
                    box.put_tokens(slow, [number])
                box.put_tokens(quick, [number])
                await asyncio.sleep(interval_s / 10)
            assert len(tokens_by_frame(bus, quick.stream_id)) <= 3
            assert len(tokens_by_frame(bus, slow.stream_id)) >= 5
            box.put(quick, quick.tokens([60], "stop"))
            await asyncio.sleep(2 * interval_s)
            assert tokens_by_frame(bus, quick.stream_id)[-1][-1] == 60, "an end waits for an interval at most"
        for _, data in bus.frames:
            await inbox.receive(Message(data))
        assert Read(readers[0]).tokens == [list(range(61))], "in order, and no number is missing"

    run_virtually(test)


def test_a_closed_stream_that_still_sends_is_cancelled_again_once_a_second_until_it_ends() -> None:
    """After a lost cancel, decode computed to the end."""

    async def test() -> None:
        ends, cancelled = Ends(), list[tuple[float, str, int]]()
        now = asyncio.get_running_loop().time
        ends.inbox.on_unwanted(lambda *stream: cancelled.append((now(), *stream)))
        ends.inbox.close(ends.stream)
        for number in range(12):
            await ends.deliver(ends.sender.tokens([number]))
            await asyncio.sleep(0.25)
        assert cancelled == [(1.25, "d", 0), (2.5, "d", 0)]
        await ends.deliver(ends.sender.error(Cancelled("the client has gone")))
        assert not ends.inbox._sources["d"].unwanted

    run_virtually(test)


@pytest.mark.parametrize("items", [1, 9])
def test_the_items_that_a_cancel_crosses_cancel_nothing(items: int) -> None:
    async def test() -> None:
        ends, cancelled = Ends(), list[int]()
        ends.inbox.on_unwanted(lambda _, stream_id: cancelled.append(stream_id))
        ends.inbox.close(ends.stream)
        for number in range(items):
            await ends.deliver(ends.sender.tokens([number]))
            await asyncio.sleep(0.1)
        await ends.deliver(ends.sender.error(Cancelled("the client has gone")))
        assert not cancelled
        assert not ends.inbox._sources["d"].unwanted

    run_virtually(test)


async def test_what_gathered_leaves_before_an_item_that_says_more(outbox: tuple[StreamOutbox, FakeBus]) -> None:
    box, bus = outbox
    one, other = OutStream("a", 1), OutStream("a", 2)
    for token in (50, 51):
        box.put_tokens(one, [token])
        box.put_tokens(other, [token - 30])
    box.put(one, one.tokens([52], num_cached_tokens=3))
    box.put_tokens(one, [53])
    box.put(other, other.tokens([], "stop"))
    await box.flushed()
    (frame,) = (unpack_frame(data).items for _, data in bus.frames)
    assert sorted(frame) == [
        StreamItem(1, 0, [50, 51]),
        StreamItem(1, 2, [52], None, None, 3),
        StreamItem(1, 3, [53]),
        StreamItem(2, 0, [20, 21]),
        StreamItem(2, 2, [], "stop"),
    ]


async def test_a_frame_that_could_not_leave_is_sent_when_the_frontend_asks_for_it(
    outbox: tuple[StreamOutbox, FakeBus],
) -> None:
    box, bus = outbox

    async def resend(_: str, first: int) -> FramesResent:
        return await box.resend(ResendFrames(reply_to="front", first=first))

    inbox = StreamInbox("front", resend)
    reader = inbox.open("d", "e")
    stream = OutStream("front", reader.stream_id)
    bus.broken = BackendUnavailable("away")
    box.put(stream, stream.tokens([1]))
    await box.flushed()
    bus.broken = None
    box.put(stream, stream.tokens([2], "length"))
    await box.flushed()
    await inbox.receive(Message(bus.frames[0][1]))
    await turns()
    for _, data in bus.frames[1:]:
        await inbox.receive(Message(data))
    assert Read(reader).tokens == [[1, 2]]


async def test_a_frame_too_large_for_nats_ends_its_streams_with_that_error(
    outbox: tuple[StreamOutbox, FakeBus],
) -> None:
    """It would stay missing, however often the frontend requests it."""
    box, bus = outbox
    inbox = StreamInbox("front", nothing_lost)
    readers = [inbox.open("d", "e") for _ in range(2)]
    streams = [OutStream("front", reader.stream_id) for reader in readers]
    bus.max_bytes = 400
    box.put(streams[0], streams[0].tokens(list(range(200))))
    box.put(streams[1], streams[1].tokens([1], "stop", 3))
    await box.flushed()
    for _, data in bus.frames:
        await inbox.receive(Message(data))
    for reader in readers:
        assert isinstance(Read(reader).error, MessageTooLarge)


async def test_closing_an_outbox_sends_what_is_queued() -> None:
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "e", lambda: 5).running() as box:
        stream = OutStream("front", 1)
        box.put(stream, stream.tokens([1], "stop"))
    assert len(bus.frames) == 1


@pytest.mark.mesh
async def test_streams_cross_nats_in_order_side_by_side(nats_url: str, namespace: str) -> None:
    async with (
        connect_bus(nats_url, "frontend") as front,
        connect_bus(nats_url, "decode") as back,
        open_inbox(front, f"{namespace}.frontend.f.tokens") as inbox,
        StreamOutbox(back, "d", lambda: "e", lambda: 5).running() as box,
    ):
        readers = [inbox.open("d", "e") for _ in range(20)]
        senders = [OutStream(inbox.subject, r.stream_id) for r in readers]
        for number in range(30):
            for sender in senders:
                box.put(sender, sender.tokens([number], "length" if number == 29 else None))
            await asyncio.sleep(0)

        async def read(stream: InStream) -> list[int]:
            reading = Read(stream)
            while not (reading.items and reading.items[-1].finish):
                await reading.came()
            return [token for tokens in reading.tokens for token in tokens]

        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*map(read, readers)) == [list(range(30))] * 20


async def test_the_logprobs_of_a_prompt_do_not_share_a_frame() -> None:
    """They may be megabytes, and NATS refuses frames of over 8 MB.

    They shared a frame with tokens of other requests, so a client got a 413 for another client's prompt.
    """
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "e", lambda: 1).running() as outbox:
        streams = [OutStream("front", i) for i in range(5)]
        for i, stream in enumerate(streams):
            outbox.put(stream, stream.tokens([i], prompt_logprobs=[TOLD] if i in (1, 2) else None))
        await outbox.flushed()
    frames = [[item.stream_id for item in unpack_frame(data).items] for _, data in bus.frames]
    assert frames == [[0], [1], [2], [3, 4]]
