"""Scaling a mesh on one machine: one worker more, one fewer, and refused changes."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from components.errors import MeshError, Rejected
from components.local_mesh import beside_local_mesh
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.planning.planner import Change
from components.settings import MeshSettings
from components.wire.plans import KillWorker, WorkerKilled
from services.planner.connectors import LocalConnector
from tests.conftest import RunService, ServiceProcess
from tests.services.local.test_supervisor import alive, until_gone
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh


@pytest.fixture
def mesh(run_service: RunService, tmp_path: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Start a mesh of fakes and wait until it is ready."""
    started: list[ServiceProcess] = []

    def start(*habits: str) -> ServiceProcess:
        process = run_service("tests.services.local.fake_mesh", str(tmp_path / "state"), "18431", *habits)
        started.append(process)
        process.wait_for_log("Ready:")
        return process

    yield start
    for process in started:
        process.kill()
        until_gone(process)


def connected(process: ServiceProcess) -> AbstractAsyncContextManager[Bus]:
    """Connect to the mesh's NATS, as its administrator."""
    mine = beside_local_mesh(MeshSettings(state_dir=process.log.parent / "state"))
    return connect_bus(mine.nats_url, "test", mine.nats_access("test"))


def told(process: ServiceProcess, scenario: Callable[[LocalConnector], Awaitable[None]]) -> None:
    """Run `scenario` with a connector to the mesh's own NATS."""

    async def main() -> None:
        async with connected(process) as bus:
            await scenario(LocalConnector(bus, "kvmesh"))

    asyncio.run(main())


def test_workers_come_and_go_one_at_a_time_and_names_are_never_used_again(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh()

    async def scenario(local: LocalConnector) -> None:
        assert await local.counts() == {"prefill": 1, "decode": 1}
        await local.scale(Change("prefill", 1, 2, ""))
        assert await local.counts() == {"prefill": 2, "decode": 1}
        await asyncio.to_thread(process.wait_for_log, "prefill-1    ready")
        await local.scale(Change("prefill", 2, 1, ""))
        assert await local.counts() == {"prefill": 1, "decode": 1}
        await asyncio.to_thread(process.wait_for_log, "prefill-1    stopped")
        await local.scale(Change("prefill", 1, 2, ""))
        await asyncio.to_thread(process.wait_for_log, "prefill-2    ready")
        with pytest.raises(Rejected, match="2 prefill workers run here, not 1"):
            await local.scale(Change("prefill", 1, 2, ""))
        with pytest.raises(Rejected, match="not a change by one"):
            await local.scale(Change("prefill", 2, 4, ""))
        with pytest.raises(Rejected, match="the last decode worker cannot be stopped"):
            await local.scale(Change("decode", 1, 0, ""))

    told(process, scenario)
    pids = re.findall(r"prefill-(\d)\s+starting  pid=(\d+)  workers=(\d)", process.logged())
    assert [number for number, _, _ in pids] == ["0", "1", "2"]
    assert [workers for _, _, workers in pids] == ["2", "3", "3"], "each shares with those that run"
    assert int(pids[1][1]) not in alive(process), "the one that left came back"
    assert {int(pids[0][1]), int(pids[2][1])} <= alive(process)
    assert process.terminate() == 0, process.logged()


def test_a_worker_is_killed_by_its_instance_id_and_started_again(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh("decode=registers")

    async def main() -> None:
        async with connected(process) as bus:
            [subject] = await subjects(bus)
            assert (await kill(bus, subject, instance_id)).name == "decode-0"
            with pytest.raises(Rejected, match="no worker 'nobody' runs here"):
                await kill(bus, subject, "nobody")

    async def kill(bus: Bus, subject: str, instance_id: str) -> WorkerKilled:
        asked = KillWorker(instance_id=instance_id)
        return await bus.call(f"{subject}.kill", asked, WorkerKilled, timeout_s=PATIENCE_S)

    async def subjects(bus: Bus) -> list[str]:
        answer = await bus.client.request("$SRV.PING.kvmesh-local", timeout=PATIENCE_S)
        return [json.loads(answer.data)["metadata"]["subject"]]

    [instance_id] = re.findall(r"decode-0\s+ready .*?instance=(\w+)", process.logged())
    asyncio.run(main())
    process.wait_for_log("decode-0     error: died (SIGKILL)")
    wait_until(lambda: len(re.findall(r"decode-0\s+ready", process.logged())) == 2, process.logged)


def test_a_new_worker_that_cannot_start_is_given_up_and_the_mesh_stays(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh("grown=dies-early")

    async def scenario(local: LocalConnector) -> None:
        await local.scale(Change("decode", 1, 2, ""))
        await asyncio.to_thread(process.wait_for_log, "given up")
        assert await local.counts() == {"prefill": 1, "decode": 1}

    told(process, scenario)
    assert process.popen.poll() is None
    assert process.terminate() == 0, process.logged()


def test_a_stop_sends_a_retiring_worker_no_second_signal(mesh: Callable[..., ServiceProcess]) -> None:
    """A second SIGTERM would end a draining worker in the middle of its streams."""
    process = mesh("grown=drains")

    async def scenario(local: LocalConnector) -> None:
        await local.scale(Change("decode", 1, 2, ""))
        await asyncio.to_thread(process.wait_for_log, "decode-1     ready")
        await local.scale(Change("decode", 2, 1, ""))
        await asyncio.to_thread(process.wait_for_log, "draining")

    told(process, scenario)
    assert process.terminate() == 0, process.logged()
    assert "drained" in process.logged()
    assert "a second signal" not in process.logged()
    assert not alive(process)


def test_without_a_mesh_the_connector_reports_that(nats_url: str, namespace: str) -> None:
    async def main() -> None:
        async with connect_bus(nats_url, "test") as bus:
            with pytest.raises(MeshError, match=f"no services.local answers in namespace {namespace}"):
                await LocalConnector(bus, namespace).counts()

    asyncio.run(main())
