"""Frames that arrive late, twice, or never."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import BackendUnavailable, FramesLost
from components.messaging import frame_order
from components.messaging.frame_order import FrameCounts, FrameOrder
from components.wire.generate import FramesResent, TokenFrame
from tests.faults.virtual_loop import run_virtually

pytestmark = pytest.mark.anyio


def frame(number: int) -> TokenFrame:
    return TokenFrame("d", "e", 1, number)


class Link:
    """An instance that keeps its frames, and a link to the frontend that loses some."""

    def __init__(self, oldest: int = 0, loses: Callable[[int], bool] = lambda _: False) -> None:
        self.made = 0
        self.oldest = oldest
        self.loses = loses
        self.away = False
        self.asked: list[int] = []
        self.dealt: list[int] = []
        self.lost: list[FramesLost] = []
        self.counts = FrameCounts()
        self.order = FrameOrder("d", lambda f: self.dealt.append(f.number), self.lost.append, self.resend, self.counts)
        self.order.opened()

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            number, self.made = self.made, self.made + 1
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        if not self.loses(number):
            self.order.arrived(frame(number))

    async def resend(self, first: int) -> FramesResent:
        self.asked.append(first)
        await asyncio.sleep(0.001)
        if self.away:
            raise BackendUnavailable("away")
        for number in range(max(first, self.oldest), self.made):
            self._deliver(number)
        return FramesResent(oldest=self.oldest, next=self.made, made=self.made)


class LosesOnce:
    """Loses each of these numbers the first time."""

    def __init__(self, *numbers: int) -> None:
        self.left = set(numbers)

    def __call__(self, number: int) -> bool:
        if number in self.left:
            self.left.remove(number)
            return True
        return False


def test_a_gap_is_filled_within_a_round_trip_and_frames_are_dealt_in_order() -> None:
    async def test() -> None:
        link = Link(loses=LosesOnce(1, 2))
        link.send(5)
        assert link.dealt == [0]
        await asyncio.sleep(0.01)
        assert link.dealt == [0, 1, 2, 3, 4]
        assert link.asked == [1]
        assert not link.lost
        assert link.counts == FrameCounts(lost=0, gaps=1, checks=0)

    run_virtually(test)


def test_a_lost_last_frame_is_asked_for_after_a_quiet_second() -> None:
    """A client waited until its deadline, because the frame with the end was lost."""

    async def test() -> None:
        link = Link(loses=LosesOnce(2))
        link.send(3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while len(link.dealt) < 3:
            link.order.repair_if_quiet()
            await asyncio.sleep(frame_order.CHECK_INTERVAL_S)
        assert loop.time() - began < 2.0
        assert link.counts == FrameCounts(lost=0, gaps=0, checks=1)

    run_virtually(test)


def test_no_frames_are_requested_without_open_streams_or_while_frames_arrive() -> None:
    async def test() -> None:
        link = Link()
        for _ in range(20):
            link.send()
            await asyncio.sleep(0.5)
            link.order.repair_if_quiet()
        link.order.is_wanted = False
        for _ in range(20):
            await asyncio.sleep(0.5)
            link.order.repair_if_quiet()
        assert link.asked == []

    run_virtually(test)


def test_requests_for_frames_continue_through_an_outage() -> None:
    async def test() -> None:
        link = Link(loses=LosesOnce(1))
        link.away = True
        link.send(3)
        await asyncio.sleep(30)
        assert link.dealt == [0]
        link.away = False
        await asyncio.sleep(frame_order.RETRY_PAUSE_S + 0.1)
        assert link.dealt == [0, 1, 2]
        assert len(link.asked) < 100

    run_virtually(test)


def test_frames_that_the_instance_has_forgotten_end_its_streams_and_later_ones_are_dealt() -> None:
    async def test() -> None:
        link = Link(oldest=3, loses=LosesOnce(1, 2, 3))
        link.send(6)
        await asyncio.sleep(0.01)
        assert [str(lost) for lost in link.lost] == ["frames 1 to 2 of decode d are lost"]
        assert link.dealt == [0, 3, 4, 5]
        assert link.counts.lost == 2

    run_virtually(test)


def test_a_foreign_frame_with_a_future_number_is_dropped() -> None:
    """The frontend would wait for the frames before it forever."""

    async def test() -> None:
        link = Link()
        link.send()
        link.order.arrived(frame(10**6))
        await asyncio.sleep(5)
        assert len(link.asked) == 1
        assert not link.order._held
        link.send(2)
        assert link.dealt == [0, 1, 2]

    run_virtually(test)


def test_a_frame_that_was_dealt_is_a_duplicate() -> None:
    async def test() -> None:
        link = Link()
        link.send(2)
        assert not link.order.arrived(frame(0))
        assert not link.order.arrived(frame(1))
        assert link.dealt == [0, 1]

    run_virtually(test)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_whatever_is_lost_and_how_often_every_frame_is_dealt_once_in_order(seed: int) -> None:
    async def test() -> None:
        draw = Random(seed)
        bad = True
        link = Link(loses=lambda _: bad and draw.random() < 0.4)
        for _ in range(40):
            link.away = draw.random() < 0.2
            link.send(draw.randrange(4))
            await asyncio.sleep(draw.choice((0.0, 0.01, 0.3, 1.5)))
            link.order.repair_if_quiet()
        bad = link.away = False
        for _ in range(20):
            await asyncio.sleep(frame_order.CHECK_INTERVAL_S)
            link.order.repair_if_quiet()
        assert link.dealt == list(range(link.made))
        assert not link.lost
        link.order.stop()

    run_virtually(test)
