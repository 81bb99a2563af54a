"""Calls to all processes, over a real NATS."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.messaging.scatter_gather import SEND_S, ask_all
from services.local.servers import NATS, running
from tests.waiting import PATIENCE_S, freeze, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]


async def answers(bus: Bus, subject: str, expected: int, *, wait_s: float, least_s: float = 0.0) -> list[bytes]:
    found: list[bytes] = []

    def receive(data: bytes) -> bool:
        found.append(data)
        return len(found) >= expected

    await ask_all(bus, subject, b"who?", receive, wait_s=wait_s, least_s=least_s)
    return found


async def test_the_wait_ends_with_the_last_expected_answer_but_not_before_the_least(
    nats_url: str, namespace: str
) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"one")
        await message.respond(b"two")
        late.append(asyncio.get_running_loop().call_later(0.2, lambda: sending.append(respond(message))))

    def respond(message: Msg) -> asyncio.Future[None]:
        return asyncio.ensure_future(message.respond(b"late"))

    late: list[asyncio.TimerHandle] = []
    sending: list[asyncio.Future[None]] = []
    async with connect_bus(nats_url, "test") as bus, bus.subscription(f"{namespace}.q", answer):
        async with asyncio.timeout(PATIENCE_S):
            assert await answers(bus, f"{namespace}.q", 2, wait_s=1000) == [b"one", b"two"]
            assert await answers(bus, f"{namespace}.q", 2, wait_s=1000, least_s=1) == [b"one", b"two", b"late"]
        await asyncio.gather(*sending)


async def test_a_question_that_no_process_receives_has_no_answer(nats_url: str, namespace: str) -> None:
    """NATS then sends an empty message."""
    async with connect_bus(nats_url, "test") as bus:
        assert await answers(bus, f"{namespace}.q", 1, wait_s=0.2) == []


async def test_a_question_fails_soon_if_nats_hangs(tmp_path: Path, namespace: str) -> None:
    """The subscription for the answers waited for 10 s, although the connection was closed after 2 s."""
    async with running(NATS, tmp_path) as server, connect_bus(server.url, "test") as bus:
        assert server.process is not None
        freeze(server.process.pid)
        began_s = time.monotonic()
        try:
            with pytest.raises(MeshError, match=f"has not answered within {SEND_S:g} s"):
                await answers(bus, f"{namespace}.q", 1, wait_s=0.2)
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert time.monotonic() - began_s < 9  # the subscription's own limit is 10 s
        await until(lambda: bus.is_connected)  # a connection that is being made cannot be closed
