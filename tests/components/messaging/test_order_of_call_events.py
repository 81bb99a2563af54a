"""A call, its repetitions and its answers, in every order: it runs once, and returns or raises once."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from typing import Final

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.micro.request import Request

from components.messaging.call_server import CallServer, Endpoint, SentAnswers
from components.messaging.clocks import PeerClocks
from components.messaging.refusals import Refusals
from components.messaging.replies import FIRST_REPEAT_S, NO_RESPONDERS, STATUS, Replies
from components.wire.codec import pack, unpack
from components.wire.prefill import KvComing, RoomOk
from components.wire.refused import Refused
from tests.faults.virtual_loop import run_virtually
from tests.waiting import turns

TIMEOUT_S: Final = 30.0
TURNS: Final = 12


class ImpossibleOrder(Exception):
    pass


class Calling:
    """A caller, an instance, and the messages between them. This is also the NATS client of both."""

    def __init__(self) -> None:
        self.questions: deque[Msg] = deque()
        self.answers: deque[Msg] = deque()
        self.running: list[asyncio.Future[None]] = []
        self.runs = 0
        self.refused_in_row = self.most_refused_in_row = self.arrived = 0
        self.is_connected = True
        self.replies = Replies(self)
        endpoint = Endpoint("call", KvComing, self._handle)
        self.server = CallServer([endpoint], "nats://n", Refusals(), PeerClocks(), lambda *_: None)
        self._receive = self.server.receive(endpoint)

    def new_inbox(self) -> str:
        return "inbox"

    async def publish(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        message = Msg(_client=self, subject=subject, reply=reply, data=data, headers=headers)
        (self.questions if reply else self.answers).append(message)

    async def call(self) -> Msg:
        return await self.replies.call("one.call", pack(KvComing(room="r")), None, TIMEOUT_S)

    async def _handle(self, request: KvComing) -> RoomOk:
        self.runs += 1
        waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.append(waited)
        await waited
        return RoomOk(room=request.room)

    async def _next_question(self) -> Msg:
        if not self.questions:
            await asyncio.sleep(FIRST_REPEAT_S)  # until it is repeated
            await turns(TURNS)
        if not self.questions:
            raise ImpossibleOrder
        return self.questions.popleft()

    async def arrive(self) -> None:
        message = await self._next_question()
        self.arrived += 1
        self.refused_in_row = 0
        await self._receive(Request(message))

    async def be_refused(self) -> None:
        """The instance is briefly disconnected from NATS."""
        message = await self._next_question()
        self.refused_in_row += 1
        self.most_refused_in_row = max(self.most_refused_in_row, self.refused_in_row)
        headers = {STATUS: NO_RESPONDERS}
        await self.replies.receive(Msg(_client=self, subject=message.reply, headers=headers))

    async def lose_question(self) -> None:
        await self._next_question()

    async def return_answer(self) -> None:
        if not self.answers:
            raise ImpossibleOrder
        await self.replies.receive(self.answers.popleft())

    async def lose_answer(self) -> None:
        if not self.answers:
            raise ImpossibleOrder
        self.answers.popleft()

    async def end(self) -> None:
        if not self.running:
            raise ImpossibleOrder
        self.running.pop().set_result(None)

    async def fail(self) -> None:
        """Another task cancels the work of the handler."""
        if not self.running:
            raise ImpossibleOrder
        self.running.pop().cancel()


EVENTS: Final[dict[str, Callable[[Calling], Awaitable[None]]]] = {
    "arrives": Calling.arrive,
    "refused": Calling.be_refused,
    "lost": Calling.lose_question,
    "answered": Calling.return_answer,
    "answer lost": Calling.lose_answer,
    "ends": Calling.end,
    "fails": Calling.fail,
}


def _orders(length: int, impossible: set[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for order in product(EVENTS, repeat=length):
        if not any(order[:done] in impossible for done in range(1, length + 1)):
            yield order


async def _settle(calling: Calling, asking: "asyncio.Task[Msg]") -> None:
    """Run to the end, without further losses."""
    while not asking.done():
        while calling.questions:
            await calling.arrive()
        await turns(TURNS)
        while calling.running:
            await calling.end()
        await turns(TURNS)
        while calling.answers:
            await calling.return_answer()
        await turns(TURNS)
        if not asking.done():
            await asyncio.sleep(FIRST_REPEAT_S)


async def _run(order: tuple[str, ...], impossible: set[tuple[str, ...]], cancelled: bool) -> None:
    calling = Calling()
    asking = asyncio.create_task(calling.call())
    await turns(TURNS)
    try:
        for done, name in enumerate(order, 1):
            try:
                await EVENTS[name](calling)
            except ImpossibleOrder:
                impossible.add(order[:done])
                order = order[: done - 1]
                break
            await turns(TURNS)
        if cancelled:
            asking.cancel()
        await _settle(calling, asking)
        assert calling.runs <= 1, order
        if asking.cancelled():
            assert cancelled, order
        elif isinstance(asking.exception(), nats.errors.NoRespondersError):
            assert calling.most_refused_in_row > 1 or order == ("refused",), order
        else:
            answer = unpack(asking.result().data, RoomOk, Refused)
            assert isinstance(answer, Refused) == ("fails" in order), order
        assert not calling.replies._waiting, order
        assert calling.running or not calling.server._tasks, order
        assert calling.running or None not in calling.server._answers._answers.values(), order
    finally:
        asking.cancel()
        calling.server.cancel()
        await asyncio.wait([asking, *calling.server._tasks])
        assert len(asyncio.all_tasks()) == 1, order


@pytest.mark.parametrize(("length", "cancelled"), [(5, False), (3, True)])
def test_a_call_runs_once_and_ends_once(length: int, cancelled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A call ended with "no listener" after two refused repetitions, even if one between them was not refused.

    And a call got no answer if its handler waited for something that another task cancelled.
    """
    caplog.set_level(logging.CRITICAL, "components")
    impossible: set[tuple[str, ...]] = set()

    async def run_all() -> None:
        for order in _orders(length, impossible):
            await _run(order, impossible, cancelled)

    run_virtually(run_all)


async def _call_for(seconds: float, answers_lost: int) -> int:
    """Return how often a call of `seconds` runs, beside other calls."""
    calling, loop = Calling(), asyncio.get_running_loop()
    calling.server._answers = sent = SentAnswers(loop.time)
    asking = asyncio.create_task(calling.replies.call("one.call", pack(KvComing(room="r")), None, 600.0))
    ends_s = loop.time() + seconds
    while not asking.done():
        await asyncio.sleep(0.5)
        sent.begin(f"other {loop.time()}")
        sent.sent(f"other {loop.time()}", b"")
        while calling.questions:
            await calling.arrive()
        if loop.time() >= ends_s and calling.running:
            await calling.end()
        await turns(TURNS)
        while calling.answers:
            if answers_lost:
                answers_lost -= 1
                await calling.lose_answer()
            else:
                await calling.return_answer()
        await turns(TURNS)
    return calling.runs


@pytest.mark.parametrize("answers_lost", [0, 1, 2])
def test_a_long_call_whose_answer_is_lost_runs_once(answers_lost: int) -> None:
    """Its repetitions became so rare that the instance forgot its answer before the next one, and ran it again."""
    for seconds in (0.0, 7.0, 9.0, 13.0, 21.0, 37.0, 69.0, 130.0):
        assert run_virtually(lambda: _call_for(seconds, answers_lost)) == 1, seconds  # noqa: B023


async def _cancelled_work(_: KvComing) -> RoomOk:
    raise asyncio.CancelledError


def test_an_immediate_call_whose_work_another_task_cancels_does_not_end_the_subscription() -> None:
    """nats-py ends a subscription whose callback raises CancelledError: the instance would take no such calls any more."""

    async def run() -> None:
        calling = Calling()
        asking = asyncio.create_task(calling.call())
        await turns(TURNS)
        immediate = Endpoint("call", KvComing, _cancelled_work, runs_inline=True)
        await calling.server.receive(immediate)(Request(calling.questions.popleft()))
        await calling.return_answer()
        assert unpack((await asking).data, Refused).error == "InvariantBroken"

    run_virtually(run)
