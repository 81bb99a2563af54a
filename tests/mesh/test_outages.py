"""Clients notice nothing while members of etcd or NATS, or all of them, fail.

Each outage of etcd outlasts the leases. Streams and short requests run all the time. `make outages` has longer outages.
"""

import asyncio
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from tests.mesh.harness import MeshProcesses
from tests.mesh.outage_mesh import (
    LEASE_S,
    Outage,
    OutageMesh,
    a_decode_cut_off,
    a_follower_frozen,
    a_follower_killed,
    a_nats_frozen,
    a_nats_killed,
    all_etcd_frozen,
    all_etcd_killed,
    all_nats_restarted,
    etcd_data_lost,
    no_quorum,
    outage_mesh,
    the_leader_frozen,
    the_leader_killed,
)
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

STREAM_TOKENS: Final = 500  # 20 s
AWAY_S: Final = 1.5 * LEASE_S
OUTAGES: Final = [
    Outage("an etcd follower is killed", a_follower_killed, AWAY_S),
    Outage("the etcd leader is killed", the_leader_killed, AWAY_S),
    Outage("an etcd follower freezes", a_follower_frozen, AWAY_S),
    Outage("the etcd leader freezes", the_leader_frozen, AWAY_S),
    Outage("etcd has no quorum", no_quorum, AWAY_S),
    Outage("all of etcd freezes", all_etcd_frozen, 3 * LEASE_S),
    Outage("all of etcd is killed", all_etcd_killed, AWAY_S),
    Outage("etcd loses its data", etcd_data_lost, AWAY_S),
    Outage("a decode is cut off from etcd", a_decode_cut_off, AWAY_S),
    Outage("a NATS server is killed", a_nats_killed, 2.0, silence_s=2.0, answer_s=3.0, disaggregated=False),
    Outage("a NATS server freezes", a_nats_frozen, 6.0, silence_s=3.5, answer_s=3.5, disaggregated=False),
    Outage("all of NATS restarts", all_nats_restarted, 0.5, silence_s=4.0, answer_s=5.0, disaggregated=False),
]

GONE_S: Final = 3.0  # until decode's loss is noticed and its lease has expired


@pytest.fixture(scope="module")
def mesh(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutageMesh]:
    with outage_mesh(preloaded, tmp_path_factory.mktemp("outages"), STREAM_TOKENS) as under_load:
        yield under_load


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
def test_clients_notice_nothing_when(outage: Outage, mesh: OutageMesh) -> None:
    outage.check(mesh)


def test_streams_of_a_killed_decode_move_and_are_counted(mesh: OutageMesh) -> None:
    """So the tests above can fail. It comes last: it replaces a process of the mesh."""
    mesh.load.until_calm()
    mesh.load.decodes = []  # one of them ends here
    with mesh.load.window() as seen:
        mesh.decodes[0].kill()
        mesh.processes.start("decode")
        wait_until(mesh.load.moves, "a stream moves")
        mesh.load.until_calm()
    print(f"\na decode is killed: {seen}")  # noqa: T201
    assert seen.moves
    assert not seen.wrong
    assert not seen.failed


def test_requests_wait_while_the_only_decode_starts_again(mock_mesh: MeshProcesses) -> None:
    """While the last decode restarted, each request got 503 at once."""
    answers: list[httpx.Response] = []

    async def ask_on(http: httpx.AsyncClient, over: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not over.is_set():
                tasks.create_task(ask(http))
                await asyncio.sleep(0.1)

    async def ask(http: httpx.AsyncClient) -> None:
        body = {"model": "mock", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers.append(await http.post("/v1/completions", json=body))

    async def run() -> None:
        async with httpx.AsyncClient(base_url=mock_mesh.one("frontend").url, timeout=PATIENCE_S) as http:
            over = asyncio.Event()
            asking = asyncio.create_task(ask_on(http, over))
            await asyncio.sleep(1.0)
            mock_mesh.one("decode").kill()
            await asyncio.sleep(GONE_S)
            await asyncio.to_thread(mock_mesh.start_one, "decode")
            await asyncio.sleep(1.0)
            over.set()
            await asking

    # On a busy machine decode may start for longer than the usual 5 s.
    mock_mesh.start("bootstrap", "prefill", "decode", "frontend", MESH_FRONTEND_NO_WORKER_WAIT_S=str(PATIENCE_S))
    asyncio.run(run())
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
