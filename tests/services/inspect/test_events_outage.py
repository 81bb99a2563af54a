"""`inspect events` reports outages of NATS, and continues."""

import asyncio
import signal
from pathlib import Path

import pytest

from components.discovery.registry import Registration, join_registry
from services.local.servers import NATS, running
from tests.components.discovery.records import record
from tests.conftest import RunService, ServiceProcess
from tests.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

FREEZES = (0.1, 0.8, 1.6)  # seconds after NATS was reached: during, after and before a query for planners


async def test_a_nats_that_hangs_is_out_of_reach_until_it_goes_on(
    etcd_url: str, namespace: str, tmp_path: Path, run_service: RunService
) -> None:
    """A hanging NATS counts as connected for another second. A query for planners then ended the command."""
    async with (
        running(NATS, tmp_path / "nats") as server,
        join_registry(etcd_url, namespace, 5.0) as registry,
        registry.advertise(Registration("one"), lambda epoch: record("one", epoch)),
    ):
        assert server.process is not None
        env = {
            "MESH_ETCD_URL": etcd_url,
            "MESH_NATS_URL": server.url,
            "MESH_NAMESPACE": namespace,
            "MESH_STATE_DIR": str(tmp_path),
        }
        events = run_service("services.inspect", "events", env=env)
        await until_told(events, "is there", 1)  # then it is connected
        for number, after_s in enumerate(FREEZES, start=1):
            await asyncio.sleep(after_s)
            server.process.send_signal(signal.SIGSTOP)
            await until_told(events, "out of reach", number)
            server.process.send_signal(signal.SIGCONT)
            await until_told(events, "reached again", number)


async def until_told(events: ServiceProcess, text: str, count: int) -> None:
    def is_told() -> bool:
        assert events.popen.poll() is None, events.logged()
        return events.logged().count(text) >= count

    await until(is_told, events.logged)
