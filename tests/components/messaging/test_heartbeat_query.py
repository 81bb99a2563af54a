"""A query to all workers of a role, over a real NATS."""

from contextlib import AsyncExitStack

import pytest

from components.discovery.book import InstanceBook
from components.messaging.connection import connect_bus
from components.messaging.heartbeat_query import KEPT_S, HeartbeatAnswers, HeartbeatQuery
from components.messaging.heartbeat_sender import HeartbeatSender, heartbeat_of
from components.messaging.liveness import HUNG_AFTER_S
from components.routing.policy import PromptLoad
from components.wire.heartbeat import Heartbeat
from components.wire.step_stats import StepStats
from tests.components.discovery.records import record

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]


async def test_all_that_are_registered_and_answer_are_known(nats_url: str, namespace: str) -> None:
    book = InstanceBook()
    running = {"a": 1, "b": 2}
    now = [0.0]
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect_bus(nats_url, "test"))
        for name in ("a", "b", "stranger"):

            def make(name: str = name) -> Heartbeat:
                return heartbeat_of(
                    name, "e1", StepStats(num_running=running.get(name, 0)), PromptLoad(0, 0.0), draining=name == "b"
                )

            await stack.enter_async_context(
                HeartbeatSender(bus, f"{namespace}.prefill.{name}", make, lambda: 5.0).running()
            )
        for name in ("a", "b", "silent"):
            book.put(name, record(name, role="prefill"))
        call = HeartbeatQuery(bus, namespace, "prefill", book, lambda: now[0])
        answers = await call.answers()
        assert {name: beat.num_running for name, beat in answers.beats.items()} == running
        assert [answers.is_lost(name) for name in ("a", "b", "silent", "stranger")] == [False, False, True, True]
        running["a"] = 7
        now[0] = KEPT_S
        assert await call.answers() is answers
        now[0] += 0.1
        fresh = (await call.answers()).last_heartbeat("a")
        assert fresh is not None
        assert fresh.num_running == 7


async def test_a_worker_of_another_epoch_has_not_answered(nats_url: str, namespace: str) -> None:
    book = InstanceBook()
    book.put("a", record("a", "e2", role="prefill"))
    beat = heartbeat_of("a", "e1", StepStats(), PromptLoad(0, 0.0), draining=False)
    async with (
        connect_bus(nats_url, "test") as bus,
        HeartbeatSender(bus, f"{namespace}.prefill.a", lambda: beat, lambda: 5.0).running(),
    ):
        assert (await HeartbeatQuery(bus, namespace, "prefill", book).answers()).is_lost("a")


async def test_without_candidates_no_query_is_sent(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "test") as bus:
        book = InstanceBook()
        book.put("a", record("a", role="prefill"))
        assert (await HeartbeatQuery(bus, namespace, "prefill", book).answers()).beats == {}
        assert (await HeartbeatQuery(bus, namespace, "decode", book).answers()).beats == {}


def test_a_worker_whose_engine_is_stalled_counts_as_lost() -> None:
    beats = {
        name: Heartbeat(instance_id=name, epoch="e", step=1, busy=True, still_s=still_s)
        for name, still_s in (("moves", 1.0), ("hangs", HUNG_AFTER_S + 1))
    }
    answers = HeartbeatAnswers(beats)
    assert not answers.is_lost("moves")
    assert answers.is_lost("hangs")
