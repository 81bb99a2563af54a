from enum import StrEnum, auto

import httpx
import pytest

from components.lifecycle import Lifecycle, Tally
from components.telemetry.worker_metrics import WorkerMetrics, serve_metrics
from engine.ports import StepStats


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
    )
    metrics.record(step)
    metrics.record(step)
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "prompt_tokens_total") == 20
    assert value(metrics, "generation_tokens_total") == 8
    assert value(metrics, "prefix_cache_queries_total") == 40
    assert value(metrics, "prefix_cache_hits_total") == 8
    assert value(metrics, "engine_step_seconds_count") == 2


def test_a_step_without_work_has_no_duration_and_an_empty_pool_divides_nothing() -> None:
    metrics = WorkerMetrics()
    metrics.record(StepStats())
    assert value(metrics, "engine_step_seconds_count") == 0
    assert value(metrics, "kv_cache_usage_perc") == 1


def test_transfers_failures_and_recomputes_are_counted() -> None:
    metrics = WorkerMetrics()
    metrics.transferred(1000, 0.002)
    metrics.transfer_failed()
    metrics.recomputed()
    names = ("kv_transfer_bytes_total", "kv_transfer_failures_total", "prompt_recomputes_total")
    assert [value(metrics, name) for name in names] == [1000, 1, 1]
    assert value(metrics, "kv_transfer_seconds_count") == 1


class Place(StrEnum):
    QUEUE = auto()
    BATCH = auto()
    GONE = auto()


def test_queues_are_shown_as_long_as_they_are() -> None:
    metrics = WorkerMetrics()
    table = {Place.QUEUE: {Place.BATCH}, Place.BATCH: {Place.GONE}}
    tally = Tally(table)
    metrics.show_queues(tally)

    def shown() -> list[float | None]:
        return [metrics.registry.get_sample_value("queue_length", {"queue": str(place)}) for place in Place]

    assert shown() == [0, 0, None]
    first, _ = (Lifecycle("thing", table, Place.QUEUE, tally) for _ in range(2))
    assert shown() == [2, 0, None]
    first.advance(Place.BATCH)
    assert shown() == [1, 1, None]
    first.advance(Place.GONE)
    assert shown() == [1, 0, None]


@pytest.mark.anyio
async def test_the_page_shows_the_metrics_and_whether_the_worker_has_started() -> None:
    metrics, well = WorkerMetrics(), [True]
    async with (
        serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: well[0]) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        page = await http.get("/metrics")
        assert page.status_code == 200
        assert "# TYPE prompt_tokens_total counter" in page.text
        assert (await http.get("/health")).json() == {"status": "ok"}
        well[0] = False
        unwell = await http.get("/health")
        assert (unwell.status_code, unwell.json()) == (503, {"status": "starting"})
        assert (await http.get("/docs")).status_code == 404
