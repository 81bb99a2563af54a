import httpx
import pytest

from components.errors import Cancelled, KvCorrupt
from components.telemetry.figures import Figures
from components.telemetry.metrics_page import serve_metrics
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.status import PageStatus
from components.wire.step_stats import StepStats
from tests.waiting import PATIENCE_S


def value(metrics: WorkerMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name)


def test_steps_are_counted_under_the_names_that_dashboards_know() -> None:
    metrics = WorkerMetrics()
    step = StepStats(
        num_running=3,
        num_waiting=2,
        prompt_tokens=10,
        decode_tokens=4,
        free_pages=50,
        cached_pages=25,
        total_pages=100,
        step_s=0.004,
        prefix_queries=40,
        prefix_hits=8,
        offloaded_pages=12,
        restored_pages=7,
        loaded_pages=8,
        saved_pages=9,
        unsaved_pages=2,
        drafted_tokens=6,
        accepted_tokens=5,
    )
    metrics.record(step)
    metrics.record(step)
    assert value(metrics, "kvmesh_num_requests_running") == 3
    assert value(metrics, "kvmesh_num_requests_waiting") == 2
    assert value(metrics, "kvmesh_kv_cache_usage_perc") == 0.25
    assert value(metrics, "kvmesh_prompt_tokens_total") == 20
    assert value(metrics, "kvmesh_generation_tokens_total") == 8
    assert value(metrics, "kvmesh_prefix_cache_queries_total") == 40
    assert value(metrics, "kvmesh_prefix_cache_hits_total") == 8
    assert value(metrics, "kvmesh_kv_offloaded_pages") == 12
    assert value(metrics, "kvmesh_kv_loaded_pages_total") == 8
    assert value(metrics, "kvmesh_kv_saved_pages_total") == 9
    assert value(metrics, "kvmesh_kv_unsaved_pages") == 2
    assert value(metrics, "kvmesh_kv_restored_pages_total") == 7
    assert value(metrics, "kvmesh_spec_decode_num_draft_tokens_total") == 6
    assert value(metrics, "kvmesh_spec_decode_num_accepted_tokens_total") == 5
    assert value(metrics, "kvmesh_engine_step_seconds_count") == 2


def test_a_step_without_work_has_no_duration_and_an_empty_pool_divides_nothing() -> None:
    metrics = WorkerMetrics()
    metrics.record(StepStats())
    assert value(metrics, "kvmesh_engine_step_seconds_count") == 0
    assert value(metrics, "kvmesh_kv_cache_usage_perc") == 1


def test_transfers_are_counted_by_outcome_and_cause_and_by_peer() -> None:
    metrics = WorkerMetrics()
    metrics.transferred("p", 1000, 0.002)
    metrics.transfer_failed("p", KvCorrupt("pages"))
    metrics.transfer_failed("q", Cancelled("gone"))
    found = {
        (outcome, cause): metrics.registry.get_sample_value(
            "kvmesh_kv_transfers_total", {"outcome": outcome, "cause": cause}
        )
        for outcome, cause in (("completed", ""), ("failed", "KvCorrupt"), ("failed", ""), ("cancelled", ""))
    }
    assert list(found.values()) == [1, 1, 0, 1]
    assert value(metrics, "kvmesh_kv_transfer_bytes_total") == 1000
    assert value(metrics, "kvmesh_kv_transfer_seconds_count") == 1
    [link] = metrics.links.shown()
    assert (link.peer, link.transfers, link.failures, link.bytes) == ("p", 1, 1, 1000)


def test_the_figures_get_pages_and_batch_of_the_latest_step_and_the_roles_tokens() -> None:
    metrics = WorkerMetrics()
    decode, prefill = Figures("decode", "d"), Figures("prefill", "p")
    metrics.show(decode)
    metrics.show(prefill)
    assert decode.pages() is None
    metrics.num_exposed_pages = lambda: 2
    metrics.record(
        StepStats(
            num_running=3,
            num_waiting=1,
            prompt_tokens=10,
            decode_tokens=4,
            free_pages=5,
            cached_pages=3,
            held_pages=2,
            total_pages=10,
        )
    )
    assert decode.pages() == PageStatus(total=10, free=5, cached=3, held=2, exposed=2)
    assert decode.batch() == (3, 1)
    assert (decode.loop.total(), prefill.loop.total()) == (4, 10)


@pytest.mark.anyio
async def test_the_page_shows_the_metrics_and_whether_the_worker_has_started() -> None:
    metrics, well = WorkerMetrics(), [True]
    async with (
        serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: well[0]) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        page = await http.get("/metrics")
        assert page.status_code == 200
        assert "# TYPE kvmesh_prompt_tokens_total counter" in page.text
        assert (await http.get("/health")).json() == {"status": "ok"}
        well[0] = False
        unwell = await http.get("/health")
        assert (unwell.status_code, unwell.json()) == (503, {"status": "starting"})
        assert (await http.get("/docs")).status_code == 404
