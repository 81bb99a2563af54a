"""NATS delivers at most once: lost messages are repeated, but calls run once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal

import nats.errors
import pytest
from nats.aio.msg import Msg

from components.errors import BackendUnavailable, ListenerGone, NobodyListens
from components.messaging import outbox as outbox_module
from components.messaging import replies
from components.messaging.bus import Bus
from components.messaging.call_server import KEPT_BYTES, KEPT_S, CallServer, Endpoint, SentAnswers, serve_calls
from components.messaging.clocks import PeerClocks
from components.messaging.connection import connect_bus
from components.messaging.nats_errors import translated_nats_errors
from components.messaging.outbox import OutStream, SentFrames, StreamOutbox
from components.messaging.refusals import Refusals
from components.wire.codec import pack
from components.wire.prefill import KvComing, RoomOk
from tests.components.messaging.fake_bus import FakeBus
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


class Server:
    """Answers calls, and counts how often each was run."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.release = asyncio.Event()
        self.release.set()

    async def handle(self, request: KvComing) -> RoomOk:
        self.runs.append(request.room)
        await self.release.wait()
        return RoomOk(room=request.room)


@asynccontextmanager
async def serving(nats_url: str, namespace: str) -> AsyncIterator[tuple[Server, Bus, str]]:
    """Yield a server, a client's bus, and the subject."""
    subject, server = f"{namespace}.bootstrap.one", Server()
    async with (
        connect_bus(nats_url, "server") as served,
        connect_bus(nats_url, "client") as client,
        serve_calls(served, "bootstrap", subject, [Endpoint("close", KvComing, server.handle)], {}),
    ):
        yield server, client, f"{subject}.close"


async def ask(bus: Bus, subject: str, timeout_s: float = PATIENCE_S) -> RoomOk:
    return await bus.call(subject, KvComing(room="r"), RoomOk, timeout_s=timeout_s)


def losing(send: Callable[..., Awaitable[None]], count: int) -> Callable[..., Awaitable[None]]:
    """Wrap `send` to lose the first `count` messages."""
    left = [count]

    async def lossy(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            await send(*args, **kwargs)

    return lossy


@pytest.mark.mesh
@pytest.mark.parametrize("what", ["question", "answer"])
async def test_a_lost_question_or_answer_costs_a_second_and_the_call_runs_once(
    nats_url: str, namespace: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost answer cost ten seconds, and one of embeddings ten minutes."""
    async with serving(nats_url, namespace) as (server, client, subject):
        await ask(client, subject)
        if what == "question":
            monkeypatch.setattr(replies, "publish", losing(replies.publish, 1))
        else:
            monkeypatch.setattr(CallServer, "_respond", losing_method(CallServer._respond))
        began = time.monotonic()
        await ask(client, subject)
        assert time.monotonic() - began > replies.FIRST_REPEAT_S * 0.9
        assert server.runs == ["r", "r"]


def losing_method(method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    lossy = losing(method, 1)

    async def respond(self: CallServer, *args: Any) -> None:
        await lossy(self, *args)

    return respond


@pytest.mark.mesh
async def test_a_call_that_takes_long_is_repeated_and_runs_once(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "FIRST_REPEAT_S", 0.05)
    async with serving(nats_url, namespace) as (server, client, subject):
        server.release.clear()
        asking = asyncio.create_task(ask(client, subject))
        await asyncio.sleep(0.5)
        server.release.set()
        await asking
        assert server.runs == ["r"]


@pytest.mark.mesh
async def test_a_call_whose_receiver_leaves_ends_when_repetitions_find_no_listener(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "FIRST_REPEAT_S", 0.05)

    taken = asyncio.Event()

    async def swallow(_: Msg) -> None:
        """Never answer."""
        taken.set()

    async with connect_bus(nats_url, "server") as served, connect_bus(nats_url, "client") as client:
        subject = f"{namespace}.bootstrap.one.close"
        async with served.subscription(subject, swallow):
            asking = asyncio.create_task(ask(client, subject))
            await taken.wait()
        with pytest.raises(ListenerGone):
            await asking
        with pytest.raises(NobodyListens) as unheard:
            await ask(client, subject)
        assert unheard.type is NobodyListens, "it has certainly reached no process"


def test_answers_are_kept_for_a_while_and_in_bounded_memory() -> None:
    now = [0.0]
    sent = SentAnswers(lambda: now[0])
    assert sent.begin("a")
    assert not sent.begin("a"), "it runs"
    assert sent.find("a") is None
    sent.sent("a", b"answer")
    assert not sent.begin("a")
    assert sent.find("a") == b"answer"
    now[0] = KEPT_S + 1
    sent.begin("b")
    sent.sent("b", b"x")
    assert sent.begin("a"), "it was forgotten"
    for number in range(10):
        sent.begin(f"big {number}")
        sent.sent(f"big {number}", bytes(KEPT_BYTES // 4))
    assert sent._bytes <= KEPT_BYTES
    assert len(sent._answers) <= 6


class Asked:
    """A call as it arrives from NATS."""

    def __init__(self, reply: str) -> None:
        self.data, self.headers, self._msg = pack(KvComing(room="r")), None, SimpleNamespace(reply=reply)
        self.answers: list[bytes] = []

    async def respond(self, answer: bytes) -> None:
        self.answers.append(answer)


async def test_answers_of_calls_that_may_run_again_do_not_displace_those_that_must_not() -> None:
    """Parts of KV dumps, 256 KiB each, evicted answers to prompts. A repeated prompt then ran again."""
    runs: list[str] = []

    async def part(_: KvComing) -> RoomOk:
        runs.append("part")
        return RoomOk(room="x" * (KEPT_BYTES // 4))

    async def once(_: KvComing) -> RoomOk:
        runs.append("once")
        return RoomOk(room="r")

    parts = Endpoint("part", KvComing, part, runs_inline=True, is_idempotent=True)
    ones = Endpoint("once", KvComing, once, runs_inline=True)
    server = CallServer([parts, ones], "nats://n", Refusals(), PeerClocks(), lambda *_: None)

    async def call(endpoint: Endpoint, reply: str) -> list[bytes]:
        asked: Any = Asked(reply)
        await server.receive(endpoint)(asked)
        return asked.answers

    first = await call(ones, "one")
    for number in range(6):
        assert await call(parts, f"part {number % 5}")
    assert await call(ones, "one") == first
    assert (runs.count("once"), runs.count("part")) == (1, 6)
    assert len(server._answers._answers) == 1


def test_frames_are_kept_for_a_while_in_bounded_memory_and_their_numbers_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    sent = SentFrames(lambda: now[0])
    lane, other = sent.lane("front"), sent.lane("other")
    for number in range(3):
        assert lane.next == number
        sent.keep(lane, b"frame")
    now[0] = outbox_module.KEPT_S + 1
    sent.keep(other, b"frame")
    assert (lane.oldest, lane.next, len(lane.frames)) == (3, 3, 0)
    assert sent.lane("front") is lane
    monkeypatch.setattr(outbox_module, "KEPT_BYTES", 100)
    for _ in range(30):
        sent.keep(lane, bytes(10))
    assert len(lane.frames) == 10
    assert lane.next == 33


class HandClock:
    """Replaces `time`."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Watched:
    """An outbox, the frontends that it reported as gone, and its clock."""

    def __init__(self, box: StreamOutbox, bus: FakeBus, clock: HandClock) -> None:
        self.box, self.bus, self.clock = box, bus, clock
        self.gone: list[str] = []
        box.on_gone(self.gone.append)

    async def send(self, stream: OutStream, finish: Literal["stop"] | None = None) -> None:
        self.box.put(stream, stream.tokens([1], finish))
        await self.box.flushed()

    def refuse(self) -> None:
        """Report that the frontend had no listener for the last probe."""
        self.bus.no_responders.pop("front")()


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    clock, bus = HandClock(), FakeBus()
    monkeypatch.setattr(outbox_module, "time", clock)
    async with StreamOutbox(bus, "d", lambda: "e", lambda: 5).running() as box:
        yield Watched(box, bus, clock)


async def test_a_frontend_that_does_not_listen_for_seconds_is_gone_and_one_that_reconnects_is_not(
    watched: Watched,
) -> None:
    """Streams of a killed frontend were generated to their ends."""
    dead, stream = True, OutStream("front", 1)

    async def run(seconds: float) -> None:
        until = watched.clock.now_s + seconds
        while watched.clock.now_s < until:
            watched.clock.now_s += outbox_module.PROBE_S / 2
            await watched.send(stream)
            if dead and "front" in watched.bus.no_responders:
                watched.refuse()

    await run(0.5 * outbox_module.GONE_AFTER_S)
    dead = False
    await run(outbox_module.GONE_AFTER_S)
    dead = True
    await run(0.5 * outbox_module.GONE_AFTER_S)
    assert not watched.gone, "it was away for a moment, twice"
    await run(2 * outbox_module.GONE_AFTER_S)
    assert set(watched.gone) == {"front"}


async def test_a_frontend_that_was_away_twice_with_a_pause_between_its_streams_is_not_gone(watched: Watched) -> None:
    """Two short outages of NATS, hours apart, counted as one long outage."""
    for number in range(2):
        await watched.send(OutStream("front", number), "stop")
        watched.refuse()
        watched.clock.now_s += 3600
    assert not watched.gone


async def test_a_stream_of_few_frames_ends_if_its_frontend_is_gone(watched: Watched) -> None:
    stream = OutStream("front", 1)
    for _ in range(2):
        await watched.send(stream)
        watched.refuse()
        watched.clock.now_s += 2 * outbox_module.GONE_AFTER_S
    assert watched.gone == ["front"]


@pytest.mark.mesh
async def test_nats_reports_whether_frames_have_a_listener(nats_url: str, namespace: str) -> None:
    no_responders: list[str] = []
    async with connect_bus(nats_url, "decode") as bus:
        subject = f"{namespace}.frontend.f.tokens"
        reply = bus.on_no_responders(subject, lambda: no_responders.append(subject))

        async def receive(_: Msg) -> None:
            """Receive a probe."""

        async with bus.subscription(subject, receive):
            await bus.publish_bytes(subject, b"x", reply)
            await bus.flush()
            await asyncio.sleep(0.05)
            assert not no_responders
        await bus.publish_bytes(subject, b"x", reply)
        await until(lambda: no_responders)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
        AttributeError("'NoneType' object has no attribute 'write'"),
        nats.errors.ConnectionClosedError(),
        OSError("reset"),
    ],
)
def test_whatever_a_connection_raises_is_an_error_of_ours(error: Exception) -> None:
    """A RuntimeError of uvloop passed every handler of MeshError: pages leaked, processes ended."""
    with pytest.raises(BackendUnavailable), translated_nats_errors("subject", "nats://n"):
        raise error
