"""`inspect workers` waits for a busy instance, and not longer than for the last answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from components.messaging.bus import Bus, connect_bus
from services.inspect.workers import ANSWER_S, srv_answers, unchanged
from tests.components.discovery.records import record

pytestmark = [pytest.mark.anyio, pytest.mark.mesh]
SOON_S = 0.01


@asynccontextmanager
async def services(bus: Bus, namespace: str, **late_s: float) -> AsyncIterator[str]:
    """Services by instance id that answer so late. Yields the subject to ask."""

    async def answer(message: Msg) -> None:
        for instance_id, seconds in late_s.items():
            metadata = {"subject": f"{namespace}.decode.{instance_id}", "instance_id": instance_id}
            asyncio.get_running_loop().call_later(seconds, reply, message, json.dumps({"metadata": metadata}).encode())

    def reply(message: Msg, data: bytes) -> None:
        sending.append(asyncio.ensure_future(message.respond(data)))

    sending: list[asyncio.Future[None]] = []
    async with bus.subscription(f"{namespace}.srv", answer):
        yield f"{namespace}.srv"
    await asyncio.gather(*sending)


async def ids(bus: Bus, subject: str, namespace: str, *expected: str) -> set[str]:
    found = await srv_answers(bus, subject, namespace, expected, SOON_S)
    return {one["metadata"]["instance_id"] for one in found}


async def test_a_registered_instance_has_longer_to_answer_than_a_stranger(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "test") as bus, services(bus, namespace, busy=0.5, stranger=1.5) as subject:
        assert await ids(bus, subject, namespace, "busy") == {"busy"}
        assert await ids(bus, subject, namespace) == set()
        await asyncio.sleep(1.5)  # the services' later answers


async def test_the_wait_ends_with_the_last_answer_or_at_the_limit(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "test") as bus, services(bus, namespace, one=0, two=0) as subject:
        began = time.monotonic()
        assert await ids(bus, subject, namespace, "one", "two") == {"one", "two"}
        assert time.monotonic() - began < ANSWER_S
        began = time.monotonic()
        assert await ids(bus, subject, namespace, "one", "killed") == {"one", "two"}
        assert time.monotonic() - began >= ANSWER_S - SOON_S


async def test_an_instance_that_registers_or_leaves_while_all_are_asked_is_not_shown_as_silent_or_unregistered() -> (
    None
):
    there, gone, again, late = record("there"), record("gone"), record("again", "e1"), record("late")
    answers = {name: name for name in ("there", "gone", "again", "late", "stranger")}
    now = [there, record("again", "e2"), late]
    assert unchanged([there, gone, again], now, answers) == ([there], {"there": "there", "stranger": "stranger"})
