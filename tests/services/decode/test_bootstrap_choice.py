"""The choice of a bootstrap replica, with a virtual clock."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from components.errors import (
    DeadlineExceeded,
    MalformedMessage,
    MeshError,
    NoBootstrapInstance,
    Overloaded,
    PeerBroken,
    PeerLost,
)
from components.wire.instances import InstanceRecord
from services.decode.bootstrap_choice import BREAKER_SETTINGS, HEDGE_AFTER_S, OPEN_TIMEOUT_S, BootstrapChoice
from tests.components.discovery.records import record
from tests.faults.virtual_loop import run_virtually

NEVER = float("inf")


class Replicas:
    """The delay and answer of each replica, and the replicas called."""

    def __init__(self, *, or_none: bool = True, **answer_s: float) -> None:
        self.choice = BootstrapChoice(Random(0), or_none=or_none)
        self.answer_s = answer_s
        self.errors: dict[str, MeshError] = {}
        self.asked: list[str] = []

    async def _ask(self, replica: InstanceRecord) -> None:
        name = replica.instance_id
        self.asked.append(name)
        await asyncio.sleep(min(self.answer_s[name], OPEN_TIMEOUT_S))
        if self.answer_s[name] >= OPEN_TIMEOUT_S:
            raise DeadlineExceeded(f"{name} is silent")
        if name in self.errors:
            raise self.errors[name]

    async def open(self) -> float:
        """Open a room; return the duration."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        records = [record(name, "1", role="bootstrap") for name in self.answer_s]
        await self.choice.open(records, self._ask)
        return loop.time() - started_s


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtually(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_replicas_take_turns_and_nobody_is_asked_twice() -> None:
    replicas = Replicas(a=0.01, b=0.01, c=0.01)
    for _ in range(6):
        await replicas.open()
    assert replicas.asked == [*"abcabc"]


@virtually
async def test_a_silent_replica_costs_one_hedge_and_is_then_passed_over() -> None:
    """Each request in turn waited ten seconds for it."""
    replicas = Replicas(a=NEVER, b=0.01)
    took_s = [await replicas.open()]
    for _ in range(200):
        await asyncio.sleep(0.005)
        took_s.append(await replicas.open())
    assert took_s[0] == pytest.approx(HEDGE_AFTER_S + 0.01)
    assert max(took_s[1:]) == pytest.approx(0.01)
    assert replicas.asked.count("a") == 1


@virtually
async def test_after_a_pause_one_request_tries_a_silent_replica_again() -> None:
    replicas = Replicas(a=NEVER, b=0.01)
    await replicas.open()
    await asyncio.sleep(OPEN_TIMEOUT_S + BREAKER_SETTINGS.first_backoff_s)
    took_s = [await replicas.open() for _ in range(10)]
    assert replicas.asked.count("a") == 2
    assert sum(took > 0.05 for took in took_s) == 1
    replicas.answer_s["a"] = 0.01
    await asyncio.sleep(OPEN_TIMEOUT_S + 2 * BREAKER_SETTINGS.first_backoff_s)
    for _ in range(4):
        await replicas.open()
    assert replicas.asked[-4:].count("a") == 2, "it answers again, and takes its turns"


@virtually
async def test_one_that_is_slow_is_not_taken_for_silent() -> None:
    replicas = Replicas(a=0.3, b=0.3)
    assert await replicas.open() == pytest.approx(0.3), "the first to answer, though another one was asked"
    await asyncio.sleep(1.0)
    for _ in range(3):
        await replicas.open()
        await asyncio.sleep(1.0)
    assert sorted(replicas.asked) == [*"aaaabbbb"]


@virtually
async def test_the_only_replica_is_waited_for_once_and_then_left_alone_for_a_while() -> None:
    replicas = Replicas(a=NEVER)
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(NoBootstrapInstance, match="a is silent"):
        await replicas.open()
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(OPEN_TIMEOUT_S)
    for _ in range(5):
        with pytest.raises(NoBootstrapInstance, match="has answered lately"):
            await replicas.open()
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(OPEN_TIMEOUT_S)
    replicas.answer_s["a"] = 0.01
    await asyncio.sleep(BREAKER_SETTINGS.first_backoff_s)
    assert await replicas.open() == pytest.approx(0.01)


@virtually
async def test_where_a_prompt_cannot_be_computed_here_a_silent_replica_is_asked_again_at_once() -> None:
    """Otherwise one lost message would fail requests for seconds."""
    replicas = Replicas(or_none=False, a=NEVER)
    with pytest.raises(NoBootstrapInstance):
        await replicas.open()
    replicas.answer_s["a"] = 0.01
    assert await replicas.open() == pytest.approx(0.01)


@pytest.mark.parametrize("error", [PeerLost("nobody listens"), PeerBroken("a defect"), Overloaded("it drains")])
def test_one_that_fails_at_once_costs_nothing_and_has_its_turn_again(error: MeshError) -> None:
    async def run() -> None:
        replicas = Replicas(a=0.0, b=0.01)
        replicas.errors["a"] = error
        assert [await replicas.open() for _ in range(3)] == pytest.approx([0.01] * 3)
        assert replicas.asked == [*"abbab"]

    run_virtually(run)


@virtually
async def test_a_refusal_is_an_answer() -> None:
    replicas = Replicas(a=0.01, b=0.01)
    replicas.errors["a"] = MalformedMessage("no room")
    with pytest.raises(MalformedMessage):
        await replicas.open()
    assert replicas.asked == ["a"]


@virtually
async def test_a_client_that_leaves_ends_the_waiting() -> None:
    replicas = Replicas(a=NEVER)
    opening = asyncio.create_task(replicas.open())
    await asyncio.sleep(0.05)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.sleep(OPEN_TIMEOUT_S)
    assert not replicas.choice._calls
    assert not replicas.choice._called_s
