"""A process that waits for etcd or NATS logs it repeatedly."""

import asyncio
import logging

import pytest

from bench.processes import free_port
from components.discovery.registry import join_registry
from components.messaging.connection import connect_bus
from components.telemetry import waiting
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("what", ["etcd", "NATS"])
async def test_a_process_that_waits_for_a_server_logs_it_until_the_server_answers(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process logged only its first retry."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    monkeypatch.setattr(waiting, "LOG_INTERVAL_S", 0.1)
    port = free_port()
    opening = (
        join_registry(f"http://127.0.0.1:{port}", "nowhere", 3.0)
        if what == "etcd"
        else connect_bus(f"nats://someone:secret@127.0.0.1:{port}", "test")
    )
    at = f"{'http' if what == 'etcd' else 'nats'}://127.0.0.1:{port}"

    def said() -> list[tuple[str, str]]:
        return [(r.message, vars(r)["url"]) for r in caplog.records if r.name == waiting.__name__]

    async def wait() -> None:
        async with opening:
            pytest.fail("nobody listens there")

    with caplog.at_level(logging.INFO):
        waits = asyncio.create_task(wait())
        await until(lambda: said().count((f"still waiting for {what}", at)) >= 2, said)
        waits.cancel()
        await asyncio.wait({waits})
    assert waits.cancelled()
    assert said()[0] == (f"waiting for {what}", at)
