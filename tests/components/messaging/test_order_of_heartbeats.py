"""Heartbeats, silence, records and pauses in every order: a loss is reported once, and an instance that answers is back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, Final

import pytest
from nats.aio.msg import Msg

from components.aio import background
from components.discovery.book import InstanceBook
from components.messaging.bus import MAX_PINGS, PING_EVERY_S, Bus
from components.messaging.heartbeat_sender import HeartbeatSender
from components.messaging.liveness import EVERY_S, HUNG_AFTER_S, SILENT_AFTER_S, Liveness, watch_heartbeats
from components.wire.codec import pack
from components.wire.heartbeat import Heartbeat
from tests.components.discovery.records import record
from tests.faults.virtual_loop import Process, Running, run_virtually

LENGTH: Final = 3  # events of an order
PAUSE_S: Final = 1.1  # two are silence


class Watched:
    """An instance, and a process that follows or queries its heartbeats."""

    def __init__(self, *, asks: bool) -> None:
        self.now = 100.0
        self.epoch, self.step = 1, 10
        self.received_s = self.moved_s = self.forgiven_s = self.now
        self.book = InstanceBook()
        self.liveness = Liveness(self.book, "decode", lambda: self.now)
        self.liveness.query_instances(asks)
        self.lost = self.returned = 0
        self.liveness.on_lost(lambda *_: setattr(self, "lost", self.lost + 1))
        self.register()

    def register(self) -> None:
        if self.is_known:  # the same process has another adapter
            self.book.put("a", record("a", str(self.epoch), adapters={str(self.now): "w"}))
        else:
            self.book.put("a", record("a", str(self.epoch)))
            self.received_s = self.moved_s = self.forgiven_s = self.now

    def restart(self) -> None:
        self.epoch += 1
        self.book.put("a", record("a", str(self.epoch)))
        self.received_s = self.moved_s = self.forgiven_s = self.now

    def leave(self) -> None:
        self.book.drop("a")

    def beat(self, step: int, *, busy: bool = True) -> None:
        if step != self.step or not busy:
            self.moved_s = self.now
        self.step, self.received_s = step, self.now
        still_s = self.now - self.moved_s
        sent = Heartbeat(instance_id="a", epoch=str(self.epoch), step=step, busy=busy, still_s=still_s)
        assert self.liveness.record_heartbeat(sent) == self.is_known

    def step_on(self) -> None:
        self.beat(self.step + 1)

    def step_back(self) -> None:
        self.beat(self.step - 1)

    def idle(self) -> None:
        self.beat(self.step, busy=False)

    def stay(self) -> None:
        self.beat(self.step)

    def beat_of_predecessor(self) -> None:
        assert not self.liveness.record_heartbeat(
            Heartbeat(instance_id="a", epoch=str(self.epoch - 1), step=99, busy=False)
        )

    def pause(self) -> None:
        if self.liveness.queries_instances:
            self.liveness.note_query("a")
        self.now += PAUSE_S
        self.liveness.check()

    def hang(self) -> None:
        """Send heartbeats without a step for too long."""
        for _ in range(int(HUNG_AFTER_S) + 2):
            self.now += 1.0
            was_lost = self.liveness.is_lost("a")
            self.stay()
            self.returned += was_lost and not self.liveness.is_lost("a")
            self.liveness.check()

    def be_held_up(self) -> None:
        """Only this process stalls."""
        self.now += 30.0
        self.moved_s = self.now
        self.liveness.reset_times()
        self.liveness.check()
        self.forgiven_s = self.now

    @property
    def is_known(self) -> bool:
        return self.liveness.find("a") is not None

    @property
    def must_be_lost(self) -> bool:
        """Whether it has ended, is silent, or hangs, as far as this process sees."""
        silent_s = self.now - max(self.received_s, self.forgiven_s)
        since_step_s = self.received_s - self.moved_s
        return not self.is_known or silent_s > SILENT_AFTER_S or since_step_s > HUNG_AFTER_S


EVENTS: Final[dict[str, Callable[[Watched], None]]] = {
    "steps": Watched.step_on,
    "counts back": Watched.step_back,
    "idles": Watched.idle,
    "same step": Watched.stay,
    "predecessor": Watched.beat_of_predecessor,
    "pause": Watched.pause,
    "hangs": Watched.hang,
    "leaves": Watched.leave,
    "registers": Watched.register,
    "restarts": Watched.restart,
    "held up": Watched.be_held_up,
}
ANSWERS: Final = frozenset({"steps", "counts back", "idles"})


def _check(watched: Watched, name: str, order: tuple[str, ...]) -> None:
    """Run one event and check its effect."""
    was_lost, told, returned = watched.liveness.is_lost("a"), watched.lost, watched.returned
    EVENTS[name](watched)
    is_lost = watched.liveness.is_lost("a")
    was_here = not was_lost or watched.returned > returned
    assert watched.lost - told == (was_here and (is_lost or name == "restarts")), order
    assert watched.lost == sum(watched.liveness.losses.values()), order
    if name in ANSWERS or name in ("held up", "predecessor"):
        assert watched.lost == told, order
    if name in ANSWERS or name == "restarts":
        assert is_lost == (not watched.is_known), order
    if watched.must_be_lost and name in ("pause", "hangs", "leaves"):
        assert is_lost, order
    if is_lost and not was_lost:
        assert watched.must_be_lost, order
    usable = [found.instance_id for found in watched.liveness.usable()]
    assert usable == ([] if is_lost else ["a"]), order


@pytest.mark.parametrize("asks", [False, True])
def test_a_loss_is_reported_once_and_an_instance_that_answers_is_back(
    asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "components")
    for order in product(EVENTS, repeat=LENGTH):
        watched = Watched(asks=asks)
        for name in (*order, "registers", "steps", "pause", "pause", "pause"):
            _check(watched, name, order)
        assert watched.liveness.is_lost("a"), order


class StallingClient:
    """A connection whose server hangs for a while. It is replaced after too many unanswered pings."""

    def __init__(self, first_ping_s: float) -> None:
        self.is_connected = True
        self.is_stalled = False
        self._pings_outstanding = 0
        self._first_ping_s = first_ping_s
        self._callback: Callable[[Msg], Awaitable[None]] | None = None
        self._waiting: list[Msg] = []

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe(self, _subject: str, cb: Callable[[Msg], Awaitable[None]], **_: Any) -> "StallingClient":
        self._callback = cb
        return self

    async def unsubscribe(self) -> None:
        self._callback = None

    async def flush(self) -> None:
        pass

    async def ping(self) -> None:
        await asyncio.sleep(self._first_ping_s)
        while True:
            self._pings_outstanding += 1
            if self._pings_outstanding > MAX_PINGS:
                self.is_connected = False
                self._waiting.clear()
            elif not self.is_stalled:
                self._pings_outstanding = 0
            await asyncio.sleep(PING_EVERY_S)

    async def answer_again(self) -> None:
        """The same server, or another one, answers."""
        self.is_stalled, self.is_connected, self._pings_outstanding = False, True, 0
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            await self.deliver(message)

    async def deliver(self, message: Msg) -> None:
        assert self._callback is not None
        if self.is_stalled:
            self._waiting.append(message)
        else:
            await self._callback(message)


async def _beat(client: StallingClient, first_s: float) -> None:
    await asyncio.sleep(first_s)
    data = pack(Heartbeat(instance_id="a", epoch="1", step=1, busy=False))
    while True:
        await client.deliver(Msg(_client=client, data=data))
        await asyncio.sleep(EVERY_S)


async def _losses_in_stall(stall_s: float, first_beat_s: float, first_ping_s: float, begins_s: float) -> int:
    book = InstanceBook()
    book.put("a", record("a", "1"))
    client = StallingClient(first_ping_s)
    bus = Bus(client, "nats://n")
    async with (
        background(client.ping(), "ping"),
        background(_beat(client, first_beat_s), "beat"),
        watch_heartbeats(bus, "ns", "decode", book) as alive,
    ):
        await asyncio.sleep(2.0 + begins_s)
        client.is_stalled = True
        await asyncio.sleep(stall_s)
        await client.answer_again()
        await asyncio.sleep(3.0)
        return alive.losses.total()


@pytest.mark.parametrize("stall_s", [1.0, 1.55, 1.7, 5.0])
def test_a_server_that_stalls_loses_no_instance(stall_s: float) -> None:
    """Heartbeats of half a second before it add to the 1.6 s after which this process leaves such a server."""
    tenths = [0.0, 0.01, 0.1, 0.2, 0.3, 0.39]
    for first_beat_s, first_ping_s, begins_s in product([*tenths, 0.49], tenths, [0.0, 0.06, 0.12, 0.18, 0.24]):
        losses = run_virtually(lambda: _losses_in_stall(stall_s, first_beat_s, first_ping_s, begins_s))  # noqa: B023
        assert losses == 0, (first_beat_s, first_ping_s, begins_s)


async def _losses_while_stopped(stopped_s: float, begins_s: float) -> int:
    """Stop only this process; return its losses."""
    book, process = InstanceBook(), Process("ours")
    book.put("a", record("a", "1"))
    client = StallingClient(0.1)
    losses: list[int] = []

    async def watch() -> None:
        async with watch_heartbeats(Bus(client, "nats://n"), "ns", "decode", book) as alive:
            await asyncio.sleep(3.0 + stopped_s + 3.0)
            losses.append(alive.losses.total())

    watching = process.spawn(watch(), "watch")
    await asyncio.sleep(0.0)
    async with background(_beat(client, 0.2), "beat"):
        await asyncio.sleep(2.0 + begins_s)
        process.state, client.is_stalled = Running.STOPPED, True
        await asyncio.sleep(stopped_s)
        process.go_on()
        await asyncio.sleep(0.001)  # it reads its socket after its timers
        await client.answer_again()
        await watching
    return losses[0]


def test_a_process_that_is_stopped_itself_loses_no_instance() -> None:
    for stopped_s, begins_s in product([0.2, 0.9, 1.0, 1.1, 1.9, 2.5, 60.0], [0.0, 0.1, 0.2, 0.24, 0.3, 0.4, 0.49]):
        losses = run_virtually(lambda: _losses_while_stopped(stopped_s, begins_s))  # noqa: B023
        assert losses == 0, (stopped_s, begins_s)


class Published:
    def __init__(self) -> None:
        self.still_s: list[float] = []

    async def publish(self, _subject: str, message: Heartbeat) -> None:
        self.still_s.append(round(message.still_s, 1))


@pytest.mark.parametrize("rest_s", [0.05, 1.4])
def test_an_engine_does_not_hang_while_its_process_is_stopped(rest_s: float) -> None:
    """After a pause of the machine, each answer seemed to report a hanging engine, and all instances were lost."""

    async def run() -> list[float]:
        published, process = Published(), Process("worker")
        busy = Heartbeat(instance_id="a", epoch="1", step=1, busy=True)
        sender = HeartbeatSender(published, "ns.decode.a", lambda: busy, lambda: rest_s)
        running = process.spawn(sender.run(), "heartbeat")
        await asyncio.sleep(3.0)
        process.state = Running.STOPPED
        await asyncio.sleep(30.0)
        process.go_on()
        await asyncio.sleep(25.0)
        running.cancel()
        return published.still_s

    still_s = run_virtually(run)
    at = still_s.index(0.0, 1)
    assert max(still_s[:at]) <= 3.0
    assert still_s[at:] == sorted(still_s[at:])
    assert still_s[-1] > HUNG_AFTER_S, "it does hang"
