"""A sample of the mesh has each worker with heartbeats and a readable metrics page. Others are listed as unknown."""

import socket

import pytest
from msgspec.structs import replace

from components.discovery.book import InstanceBook
from components.messaging.liveness import Liveness
from components.planning.samples import PLANNED
from components.telemetry.metrics_page import serve_metrics
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, KvEndpoint, RankEndpoint, Role
from components.wire.step_stats import StepStats
from services.planner.fleet_sampler import FleetSampler
from tests.components.kv_transfer.fake_transfer import endpoint

pytestmark = pytest.mark.anyio


class Mesh:
    """Records and heartbeats at times that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.book = InstanceBook()
        self.liveness = {role: Liveness(self.book, role, self.clock) for role in PLANNED}
        self.sampler = FleetSampler(self.book, self.liveness, self.clock)

    def clock(self) -> float:
        return self.now_s

    def register(self, name: str, role: Role, http: str, kv: KvEndpoint | None = None, epoch: str = "e") -> None:
        record = InstanceRecord(
            instance_id=name,
            epoch=epoch,
            role=role,
            host=socket.gethostname(),
            pid=1,
            started_unix_ms=0,
            subject=name,
            http=http,
            kv=kv,
        )
        self.book.put(f"{role}/{name}", record)

    def beat(self, name: str, epoch: str = "e", **facts: object) -> None:
        beat = Heartbeat(instance_id=name, epoch=epoch, step=1, busy=False, total_pages=10, free_pages=4, **facts)
        for liveness in self.liveness.values():
            liveness.record_heartbeat(beat)


async def test_a_sample_joins_page_and_heartbeats_and_averages_waiting_requests() -> None:
    metrics, mesh = WorkerMetrics(), Mesh()
    metrics.record(StepStats(prompt_tokens=100, step_s=0.2))
    async with serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: True) as url:
        kv = replace(endpoint("p"), followers=[RankEndpoint(pid=2, device="cuda:1", base_address=0)])
        mesh.register("p", "prefill", url, kv)
        mesh.beat("p", num_waiting=4, accepted=7, queued_tokens=500, cached_pages=1)
        mesh.now_s += 1.0
        mesh.beat("p", num_waiting=0, accepted=9, queued_tokens=300, cached_pages=1)
        mesh.now_s += 0.5
        mesh.beat("p", num_waiting=0, accepted=9, queued_tokens=300, cached_pages=1)
        mesh.now_s += 0.5
        seen = await mesh.sampler.observe({"prefill": 1, "decode": 0})
        [worker] = seen.workers["prefill"]
        assert (worker.busy_s, worker.steps, worker.prompt_tokens) == (pytest.approx(0.2), 1, 100)
        assert (worker.accepted, worker.queued_tokens, worker.waiting) == (9, 300, 2.0)
        assert (worker.used_pages, worker.total_pages) == (5, 10)
        assert (seen.unknown, seen.wanted) == ([], {"prefill": 1, "decode": 0})
        assert (seen.devices("prefill"), seen.devices("decode")) == (2, 1)
        mesh.beat("p", num_waiting=6)
        mesh.now_s += 0.5
        again = await mesh.sampler.observe({})
        assert again.workers["prefill"][0].waiting == 6.0, "since the last look"
        mesh.beat("p", draining=True)
        leaving = await mesh.sampler.observe({})
        assert (leaving.serving("prefill"), leaving.draining("prefill"), leaving.unknown) == (0, 1, [])


async def test_an_instance_that_is_silent_or_unreadable_is_unknown() -> None:
    metrics, mesh = WorkerMetrics(), Mesh()
    async with serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: True) as url:
        mesh.register("heard", "decode", url)
        mesh.register("never-heard", "decode", url)
        mesh.register("silent", "decode", url)
        mesh.register("no-page", "prefill", "http://127.0.0.1:1")
        mesh.register("f", "frontend", "http://127.0.0.1:1")
        for name in ("heard", "silent", "no-page"):
            mesh.beat(name)
        mesh.now_s += 2.5
        mesh.beat("heard")
        mesh.beat("no-page")
        seen = await mesh.sampler.observe({})
    assert [worker.instance_id for worker in seen.workers["decode"]] == ["heard"]
    assert sorted(seen.unknown) == ["f", "never-heard", "no-page", "silent"]
    assert list(seen.frontends) == []


async def test_a_prefill_and_a_decode_worker_may_have_one_instance_id() -> None:
    """Each heartbeat replaced that of the other role, so one of both workers was always unknown."""
    mesh = Mesh()
    async with serve_metrics(WorkerMetrics().registry, "127.0.0.1", 0, lambda: True) as url:
        mesh.register("host-1", "prefill", url, epoch="p")
        mesh.register("host-1", "decode", url, epoch="d")
        mesh.beat("host-1", "p", num_waiting=7)
        mesh.now_s += 1.0
        mesh.beat("host-1", "d")
        mesh.now_s += 0.5
        seen = await mesh.sampler.observe({})
    assert seen.unknown == []
    assert [worker.waiting for role in PLANNED for worker in seen.workers[role]] == [7.0, 0.0]
    assert mesh.sampler.ages_s() == {"host-1": 1.5}


async def test_an_unreadable_page_is_a_warning_once_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    """The planner removed no more workers, and only its debug log had the cause."""
    mesh = Mesh()
    mesh.register("f", "frontend", "http://127.0.0.1:1")
    for _ in range(3):
        await mesh.sampler.observe({})
    mesh.register("f", "frontend", "http://127.0.0.1:2")
    await mesh.sampler.observe({})
    warned = [vars(record) for record in caplog.records if "metrics page cannot be read" in record.message]
    assert [(one["role"], one["instance"]) for one in warned] == [("frontend", "f")] * 2
    assert ["127.0.0.1:1/" in warned[0]["cause"], "127.0.0.1:2/" in warned[1]["cause"]] == [True, True]
    assert "MESH_METRICS_HOST" in warned[0]["message"]
    assert "MESH_METRICS_LOGIN_FILE" in warned[0]["message"]
