"""A bootstrap replica that is registered and answers nothing."""

import asyncio
from pathlib import Path

import pytest

from components.wire.prefill import OpenRoom, RoomOk
from services.bootstrap.service import BootstrapService
from tests.faults import clients
from tests.faults.mesh_run import run_faults
from tests.faults.nodes import Frontend


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hung_bootstrap_replica_delays_few_requests(
    monkeypatch: pytest.MonkeyPatch, home: Path, replicas: int
) -> None:
    """23 of 48 requests took more than five seconds: each call to it waited for ten, as if it were the first."""
    took_s: list[float] = []
    opened: list[BootstrapService] = []
    run, open_room = clients.Client.run, BootstrapService.open

    async def timed(self: clients.Client, frontend: Frontend) -> None:
        started_s = asyncio.get_running_loop().time()
        await run(self, frontend)
        took_s.append(asyncio.get_running_loop().time() - started_s)

    async def hangs(self: BootstrapService, request: OpenRoom) -> RoomOk:
        opened.append(self)
        if self is opened[0]:
            await asyncio.Event().wait()
        return await open_room(self, request)

    monkeypatch.setattr(clients.Client, "run", timed)
    monkeypatch.setattr(BootstrapService, "open", hangs)
    counts = {"frontend": 1, "decode": 2, "prefill": 2, "bootstrap": replicas}
    outcome = run_faults(home, 3, [], num_clients=40, over_s=20.0, counts=counts)
    assert [client.error for client in outcome.clients] == [None] * 40
    if replicas == 2:
        assert max(took_s) < 0.5, "a hedge of 0.1 s beside what an answer takes"
        assert not outcome.counts["recomputes"], "all came disaggregated"
    else:
        assert sum(took > 1 for took in took_s) <= 12, "each decode waits once in a while"
        assert max(took_s) < 2.5
