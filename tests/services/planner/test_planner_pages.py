"""Pages of real metrics become samples."""

import asyncio
import threading

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from components.discovery.pages import page_of
from components.errors import MalformedMessage, PeerLost
from components.telemetry.metrics_page import serve_metrics
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.instances import InstanceRecord
from components.wire.step_stats import StepStats
from services.frontend.metrics import FrontendMetrics
from services.planner.pages import AT_ONCE, Counters, PageReader, read_frontend, read_worker

RECORD = InstanceRecord(
    instance_id="i",
    epoch="e",
    role="decode",
    host="box",
    pid=1,
    started_unix_ms=0,
    subject="s",
    http="http://127.0.0.1:9",
)


def test_a_workers_page_has_its_counters() -> None:
    metrics = WorkerMetrics()
    metrics.record(StepStats(prompt_tokens=100, decode_tokens=3, step_s=0.2))
    metrics.record(StepStats(decode_tokens=4, step_s=0.1))
    metrics.record(StepStats(step_s=9.0))  # without tokens
    page = generate_latest(metrics.registry).decode()
    found = read_worker(page)
    assert found == Counters(pytest.approx(0.3), 2, 100, 7)
    with pytest.raises(MalformedMessage, match="kvmesh_engine_step_seconds_sum"):
        read_worker("# HELP nothing\n")
    assert read_worker(f"other{{ is not parsed\n{page}") == found


def test_right_guesses_are_not_counted_as_tokens_of_more_requests() -> None:
    metrics = WorkerMetrics()
    metrics.record(StepStats(decode_tokens=5, drafted_tokens=7, accepted_tokens=4, step_s=0.2))
    page = generate_latest(metrics.registry).decode()
    assert read_worker(page).generated_tokens == 1
    earlier = "\n".join(line for line in page.splitlines() if "spec_decode" not in line)
    assert read_worker(f"{earlier}\n").generated_tokens == 5, "of a worker that does not count them"


@pytest.mark.parametrize("number", ["+Inf", "-Inf", "NaN", "1e400"])
@pytest.mark.parametrize("name", ["kvmesh_engine_step_seconds_sum", "kvmesh_engine_step_seconds_count"])
def test_a_number_that_is_not_finite_is_none(name: str, number: str) -> None:
    """An infinite count ended the planner; NaN seconds in its step times made it add all allowed workers."""
    metrics = WorkerMetrics()
    metrics.record(StepStats(prompt_tokens=100, decode_tokens=3, step_s=1.0))
    page = generate_latest(metrics.registry).decode()
    assert f"{name} 1.0" in page
    with pytest.raises(MalformedMessage, match=name):
        read_worker(page.replace(f"{name} 1.0", f"{name} {number}"))


def test_a_frontends_sum_that_is_not_finite_does_not_count() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    metrics.time_to_first_token.labels("a", "chat").observe(0.5)
    page = generate_latest(metrics.registry).decode()
    seen = read_frontend("f", page.replace("} 0.5\n", "} NaN\n"))
    assert (seen.ttft.count, seen.ttft.total_s) == (1.0, 0.0)


def test_histograms_of_a_frontends_page_are_summed_over_models() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    assert read_frontend("f", generate_latest(metrics.registry).decode()).ttft.count == 0
    metrics.time_to_first_token.labels("a", "chat").observe(0.2)
    metrics.time_to_first_token.labels("b", "completions").observe(0.9)
    metrics.gaps.of("a").observe(0.012)
    seen = read_frontend("f", generate_latest(metrics.registry).decode())
    assert seen.ttft.count == 2
    assert seen.ttft.mean_s == pytest.approx(0.55)
    assert seen.ttft.share_within(0.25) == 0.5
    assert seen.itl.count == 1
    assert seen.itl.share_within(0.015) == 1.0
    with pytest.raises(MalformedMessage):
        read_frontend("f", "{}{}{")


def test_a_loopback_page_of_another_host_is_read_by_that_hosts_name() -> None:
    assert page_of(RECORD, "box") == "http://127.0.0.1:9/metrics"
    assert page_of(RECORD, "other") == "http://box:9/metrics"


def test_a_frontends_own_page_is_read_because_its_port_may_be_shared() -> None:
    assert page_of(replace(RECORD, metrics="http://127.0.0.1:10"), "box") == "http://127.0.0.1:10/metrics"


@pytest.mark.anyio
async def test_a_page_is_fetched_and_failures_are_reported() -> None:
    metrics = WorkerMetrics()
    async with serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: True) as url:
        reader = PageReader()
        assert await reader.read(f"{url}/metrics", read_worker) == Counters(0.0, 0, 0, 0)
        with pytest.raises(PeerLost, match="answers 404"):
            await reader.read(f"{url}/nothing", read_worker)
    with pytest.raises(PeerLost, match="cannot be read"):
        await reader.read(f"{url}/metrics", read_worker)


@pytest.mark.anyio
async def test_a_page_has_its_whole_time_however_many_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of pages shared few threads, and their queueing counted: most workers were unknown."""
    monkeypatch.setattr("services.planner.pages.TIMEOUT_S", 2.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.4)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\n7")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        reader, count = PageReader(), 6 * AT_ONCE
        assert await asyncio.gather(*(reader.read(url, int) for _ in range(count))) == [7] * count


@pytest.mark.anyio
async def test_pages_are_parsed_in_threads() -> None:
    """A page took milliseconds of the event loop, so a large fleet's pages blocked it for seconds."""
    async with serve_metrics(WorkerMetrics().registry, "127.0.0.1", 0, lambda: True) as url:
        parsed_in = await PageReader().read(f"{url}/metrics", lambda _: threading.current_thread())
    assert parsed_in is not threading.current_thread()
