"""A process that was started by hand and waits for etcd or NATS says so, again and again."""

import asyncio
import logging
from contextlib import suppress

import pytest

from bench.processes import free_port
from components.discovery.registry import join_registry
from components.messaging.bus import connect_bus
from components.telemetry import waiting

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("what", ["etcd", "NATS"])
async def test_who_waits_for_a_server_says_so_until_it_is_there(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It said once that it tries again; then there was silence for ever."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.1)
    port = free_port()
    opening = (
        join_registry(f"http://127.0.0.1:{port}", "nowhere", 3.0)
        if what == "etcd"
        else connect_bus(f"nats://someone:secret@127.0.0.1:{port}", "test")
    )
    with caplog.at_level(logging.INFO), suppress(TimeoutError):
        async with asyncio.timeout(0.6), opening:
            pytest.fail("nobody listens there")
    said = [(r.message, vars(r)["url"]) for r in caplog.records if r.name == waiting.__name__]
    at = f"{'http' if what == 'etcd' else 'nats'}://127.0.0.1:{port}"
    assert said[0] == (f"waiting for {what}", at)
    assert said.count((f"still waiting for {what}", at)) >= 2
