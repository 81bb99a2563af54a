"""The wait for answers on `$SRV` includes busy instances, and ends with the last answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.msg import Msg

from components.messaging import micro_services
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.messaging.micro_services import REGISTERED_TIMEOUT_S, find_services
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.mesh]
SOON_S = 0.01


@asynccontextmanager
async def services(bus: Bus, namespace: str, **late_s: float) -> AsyncIterator[str]:
    """Serve instances that answer after `late_s`. Yields: the subject to call."""

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
    found = await find_services(bus, subject, namespace, [f"{namespace}.decode.{one}" for one in expected], SOON_S)
    return {one.metadata.instance_id for one in found}


async def test_a_registered_instance_has_longer_to_answer_than_a_stranger(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "test") as bus, services(bus, namespace, busy=0.5, stranger=1.5) as subject:
        assert await ids(bus, subject, namespace, "busy") == {"busy"}
        assert await ids(bus, subject, namespace) == set()
        await asyncio.sleep(1.5)  # until later answers have arrived


async def test_the_wait_ends_with_the_last_answer_or_at_the_limit(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect_bus(nats_url, "test") as bus, services(bus, namespace, one=0, two=0) as subject:
        with monkeypatch.context() as patched:
            patched.setattr(micro_services, "REGISTERED_TIMEOUT_S", 1000.0)
            async with asyncio.timeout(PATIENCE_S):
                assert await ids(bus, subject, namespace, "one", "two") == {"one", "two"}
        began = time.monotonic()
        assert await ids(bus, subject, namespace, "one", "killed") == {"one", "two"}
        assert time.monotonic() - began >= REGISTERED_TIMEOUT_S - SOON_S


async def test_other_services_have_any_form(nats_url: str, namespace: str) -> None:
    """An answer without metadata raised an error in the connection's task."""
    mine = {"name": "x", "metadata": {"subject": f"{namespace}.local.a"}, "endpoints": [{"name": "count"}]}
    elsewhere = {"name": "x", "metadata": {"subject": f"{namespace}0.local.a"}}
    foreign = [b"no JSON", b"[]", b'{"metadata": null}', b'{"name": "y", "endpoints": [{"name": "z", "data": "text"}]}']

    async def answer(message: Msg) -> None:
        for data in (*foreign, *(json.dumps(one).encode() for one in (elsewhere, mine))):
            await message.respond(data)

    async with connect_bus(nats_url, "test") as bus, bus.subscription(f"{namespace}.srv", answer):
        [found] = await find_services(bus, f"{namespace}.srv", namespace)
    assert (found.name, found.metadata.subject, found.num_errors) == ("x", f"{namespace}.local.a", 0)
