"""A mesh over clusters of etcd and NATS, with clients; and outages of these servers, as context managers."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

from components.discovery.registry import join_registry
from components.wire.instances import InstanceRecord, Role
from tests.mesh.clusters import EtcdCluster, NatsCluster, Proxy
from tests.mesh.harness import MeshProcesses, Worker
from tests.mesh.mocks import MOCK_ENV, NO_COST
from tests.mesh.outage_load import PROMPT_TOKENS, Load, Window
from tests.mesh.preloaded import Preloaded

LEASE_S: Final = 2
STEP_S: Final = 0.04  # a stream's usual silence
AFTER_S: Final = 1.5  # the effects of a server's return count for its outage
NAMESPACE: Final = "outages"
USUAL_S: Final = 2.0  # on a busy machine without a fault; waiting for etcd would take 3 s, as long as the outage
TRIES: Final = 6
ENV: Final = {
    **MOCK_ENV,
    **NO_COST,
    "MESH_ENGINE__MOCK__SPEEDUP": "1",
    "MESH_ENGINE__MOCK__STEP_S": str(STEP_S),
    "MESH_LEASE_TTL_S": str(LEASE_S),
    "MESH_FRONTEND_MAX_STORED_RESPONSES": "0",
}


@dataclass(slots=True)
class OutageMesh:
    """Two prefills, two decodes, two frontends and a bootstrap. The first decode reaches etcd by `proxy` alone."""

    etcd: EtcdCluster
    nats: NatsCluster
    proxy: Proxy
    processes: MeshProcesses
    load: Load
    decodes: list[Worker]


@contextmanager
def outage_mesh(preloaded: Preloaded, home: Path, stream_tokens: int) -> Iterator[OutageMesh]:
    """Run the mesh under load. Each stream has `stream_tokens` tokens, one each `STEP_S`."""
    with (
        EtcdCluster(home) as etcd,
        NatsCluster(home) as nats,
        Proxy(etcd.url) as proxy,
        MeshProcesses(etcd.url, nats.url, NAMESPACE, home, "mock", ENV, preloaded) as processes,
    ):
        processes.modules["frontend"] = "tests.mesh.verbose_frontend"
        processes.start("bootstrap", "prefill", "prefill")
        decodes = [processes.start_one("decode", MESH_ETCD_URL=proxy.url), processes.start_one("decode")]
        frontends = processes.start("frontend", "frontend")
        urls = cycle([worker.url for worker in frontends])
        load = Load(home, urls, [worker.log for worker in frontends], stream_tokens)
        load.prefills, load.decodes = (pages(etcd.url, role) for role in ("prefill", "decode"))
        with load:
            yield OutageMesh(etcd, nats, proxy, processes, load, decodes)


def pages(etcd_url: str, role: Role) -> list[str]:
    """The metrics pages of a role's instances."""

    async def look() -> list[InstanceRecord]:
        async with join_registry(etcd_url, NAMESPACE, LEASE_S) as registry:
            return registry.book.of_role(role)

    return [record.http for record in asyncio.run(look()) if record.http is not None]


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage, and its limits for clients. No request may fail, and no text differ."""

    name: str
    under: Callable[[OutageMesh], AbstractContextManager[None]]  # fails a server inside, and repairs it after
    lasts_s: float
    silence_s: float = USUAL_S  # the most of a stream
    answer_s: float = USUAL_S  # the most of a short request
    moves: bool = False  # whether streams may go to another decode
    disaggregated: bool = True  # every new prompt is computed at prefill

    def __str__(self) -> str:
        return self.name

    def happen(self, mesh: OutageMesh) -> Window:
        """Run the outage on a healthy mesh."""
        mesh.load.until_calm()
        with mesh.load.window() as seen:
            with self.under(mesh):
                time.sleep(self.lasts_s)
            time.sleep(AFTER_S)
        print(f"\n{self.name}: {seen}")  # noqa: T201 - the figures matter also if limits hold
        return seen

    def check(self, mesh: OutageMesh) -> None:
        """The limits of time and moves must hold in one of `TRIES`: a busy machine may stall a process for a second."""
        exceeded: list[list[str]] = []
        while len(exceeded) < TRIES:
            seen = self.happen(mesh)
            assert not list(self.faults(seen))
            exceeded.append(list(self.exceeded(seen)))
            if not exceeded[-1]:
                return
        raise AssertionError(exceeded)

    def faults(self, seen: Window) -> Iterator[str]:
        """Yield the errors that no stall of a process may cause."""
        if seen.failed:
            yield f"{len(seen.failed)} failed"
        if seen.wrong:
            yield f"{len(seen.wrong)} texts are wrong: {seen.wrong[:3]}"

    def exceeded(self, seen: Window) -> Iterator[str]:
        """Yield an error for each limit that was exceeded."""
        if seen.moves and not self.moves:
            yield f"{len(seen.moves)} moves from workers that are well"
        if seen.longest_silence_s > self.silence_s:
            yield f"a stream was silent for {seen.longest_silence_s:.2f} s, the limit is {self.silence_s} s"
        if seen.slowest_s > self.answer_s:
            yield f"an answer took {seen.slowest_s:.2f} s, the limit is {self.answer_s} s"
        if not seen.answered or not seen.stream_events:
            yield "no request was sent"
        if self.disaggregated and (seen.at_decode or seen.at_prefill < PROMPT_TOKENS * seen.answered):
            yield f"prompt tokens computed: {seen.at_prefill} at prefill, {seen.at_decode} at decode"


# of etcd


@contextmanager
def a_follower_killed(mesh: OutageMesh) -> Iterator[None]:
    mesh.etcd.followers()[0].kill()
    yield
    mesh.etcd.start()


@contextmanager
def the_leader_killed(mesh: OutageMesh) -> Iterator[None]:
    mesh.etcd.leader().kill()
    yield
    mesh.etcd.start()


@contextmanager
def a_follower_frozen(mesh: OutageMesh) -> Iterator[None]:
    """Like a loss of power: connections stay open, but no request is answered."""
    mesh.etcd.followers()[0].freeze()
    yield
    mesh.etcd.thaw()


@contextmanager
def the_leader_frozen(mesh: OutageMesh) -> Iterator[None]:
    """When it continues, it takes itself for the leader for a moment."""
    mesh.etcd.leader().freeze()
    yield
    mesh.etcd.thaw()


@contextmanager
def no_quorum(mesh: OutageMesh) -> Iterator[None]:
    """One member is left: it accepts connections and answers `status`, but has no leader."""
    for member in mesh.etcd.members[1:]:
        member.freeze()
    yield
    mesh.etcd.thaw()


@contextmanager
def all_etcd_frozen(mesh: OutageMesh) -> Iterator[None]:
    """Leases expire only after it continues."""
    for member in mesh.etcd.members:
        member.freeze()
    yield
    mesh.etcd.thaw()


@contextmanager
def all_etcd_killed(mesh: OutageMesh) -> Iterator[None]:
    """Its data, with all leases, survive."""
    for member in mesh.etcd.members:
        member.kill()
    yield
    mesh.etcd.start()


@contextmanager
def etcd_data_lost(mesh: OutageMesh) -> Iterator[None]:
    """It starts again as an empty cluster: no record, no lease, revisions from 1."""
    for member in mesh.etcd.members:
        member.kill()
    mesh.etcd.lose_data()
    yield
    mesh.etcd.start()


@contextmanager
def a_decode_cut_off(mesh: OutageMesh) -> Iterator[None]:
    """The first decode alone does not reach etcd, and its lease expires."""
    mesh.proxy.shut()
    yield
    mesh.proxy.open()


# of NATS


@contextmanager
def a_nats_killed(mesh: OutageMesh) -> Iterator[None]:
    mesh.nats.busiest().kill()
    yield
    mesh.nats.start()


@contextmanager
def a_nats_frozen(mesh: OutageMesh) -> Iterator[None]:
    """Its clients notice when their pings are not answered."""
    mesh.nats.busiest().freeze()
    yield
    mesh.nats.thaw()


@contextmanager
def all_nats_restarted(mesh: OutageMesh) -> Iterator[None]:
    for member in mesh.nats.members:
        member.kill()
    yield
    mesh.nats.start()
