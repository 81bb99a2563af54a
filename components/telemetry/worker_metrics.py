"""A worker's metrics, under vLLM's names where they exist. Nothing here runs per token."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from components.http.server import serve_http
from components.lifecycle import S, Tally
from components.telemetry.figures import Batch, Figures
from components.telemetry.links import Links
from components.wire.status import PageStatus

STEP_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
TRANSFER_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class StepFigures(Protocol):
    """One engine step's figures, as in the engine's `StepStats`."""

    @property
    def num_running(self) -> int:
        pass

    @property
    def num_waiting(self) -> int:
        pass

    @property
    def prompt_tokens(self) -> int:
        pass

    @property
    def decode_tokens(self) -> int:
        pass

    @property
    def free_pages(self) -> int:
        pass

    @property
    def cached_pages(self) -> int:
        pass

    @property
    def held_pages(self) -> int:
        pass

    @property
    def total_pages(self) -> int:
        pass

    @property
    def step_s(self) -> float:
        pass

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens since start."""

    @property
    def prefix_hits(self) -> int:
        pass


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.links = Links()
        self.num_exposed_pages: Callable[[], int] = int
        self.num_prompt_tokens = 0  # computed here
        self.num_generated_tokens = 0
        self._latest: StepFigures | None = None
        self._shown("num_requests_running", "Requests in the batch.", lambda step: step.num_running)
        self._shown("num_requests_waiting", "Requests queued for pages or budget.", lambda step: step.num_waiting)
        self._shown("kv_cache_usage_perc", "Share of KV pages that requests hold, 0 to 1.", _usage)
        looked_up = "Prompt tokens looked up in the prefix cache."
        self._shown("prefix_cache_queries_total", looked_up, lambda step: step.prefix_queries)
        self._shown("prefix_cache_hits_total", "Of those, found.", lambda step: step.prefix_hits)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens computed here.")
        self._generated = self._counter("generation_tokens", "Tokens sampled here.")
        self._steps = Histogram(
            "engine_step_seconds", "Duration of an engine step.", buckets=STEP_BUCKETS, registry=self.registry
        )
        self._transfers = Histogram(
            "kv_transfer_seconds",
            "From prefill's first write to decode's last page.",
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self._transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes that were moved.")
        self._transfer_failures = self._counter("kv_transfer_failures", "Transfers that did not complete.")
        self._cancelled = self._counter(
            "kv_transfers_cancelled", "Transfers that ended early as their client had gone."
        )
        self._corrupt = self._counter("kv_transfers_corrupt", "Transfers that did not arrive as they were sent.")
        self._queues = Gauge(
            "queue_length", "Requests in each state of this role's lifecycle.", ["queue"], registry=self.registry
        )
        self._recomputes = self._counter("prompt_recomputes", "Prompts computed here because their KV did not come.")

    def record(self, figures: StepFigures) -> None:
        """Other gauges are read on demand."""
        self._latest = figures
        if figures.prompt_tokens:
            self._prompt.inc(figures.prompt_tokens)
            self.num_prompt_tokens += figures.prompt_tokens
        if figures.decode_tokens:
            self._generated.inc(figures.decode_tokens)
            self.num_generated_tokens += figures.decode_tokens
        if figures.prompt_tokens or figures.decode_tokens:
            self._steps.observe(figures.step_s)

    def show(self, figures: Figures) -> None:
        """Give the process's figures what the engine reports."""
        figures.links = self.links
        figures.pages = self.pages
        figures.batch = self.batch
        figures.loop.total = (
            (lambda: self.num_prompt_tokens) if figures.role == "prefill" else lambda: self.num_generated_tokens
        )

    def batch(self) -> Batch:
        return Batch() if self._latest is None else Batch(self._latest.num_running, self._latest.num_waiting)

    def pages(self) -> PageStatus | None:
        """None before the first step."""
        if (step := self._latest) is None:
            return None
        return PageStatus(
            total=step.total_pages,
            free=step.free_pages,
            cached=step.cached_pages,
            held=step.held_pages,
            exposed=self.num_exposed_pages(),
        )

    def show_queues(self, tally: Tally[S]) -> None:
        for state in tally.states:
            self._queues.labels(str(state)).set_function(lambda state=state: tally[state])  # type: ignore[misc]

    def show_kv_events(self, batches: Callable[[], int], dropped: Callable[[], int]) -> None:
        self._gauge("kv_event_batches_total", "Batches of KV events, numbered.").set_function(batches)
        self._gauge("kv_event_batches_dropped_total", "Of those, not sent: routers ask for a dump.").set_function(
            dropped
        )

    def transferred(self, num_bytes: int, duration_s: float) -> None:
        self._transfer_bytes.inc(num_bytes)
        self._transfers.observe(duration_s)

    def transfer_failed(self) -> None:
        self._transfer_failures.inc()

    def transfer_cancelled(self) -> None:
        self._cancelled.inc()

    def corrupt(self) -> None:
        self._corrupt.inc()

    def recomputed(self) -> None:
        """A transfer failed, so its prompt is computed here."""
        self._recomputes.inc()

    def _shown(self, name: str, text: str, figure: Callable[[StepFigures], float]) -> None:
        self._gauge(name, text).set_function(lambda: 0 if self._latest is None else figure(self._latest))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)


def _usage(step: StepFigures) -> float:
    return 1 - (step.free_pages + step.cached_pages) / max(1, step.total_pages)


@dataclass(frozen=True, slots=True)
class _Page:
    host: str
    port: int
    drain_timeout_s: float = 1.0


@asynccontextmanager
async def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    started: Callable[[], bool],
    *,
    reasons: Callable[[], Sequence[str]] = tuple,
    facts: Callable[[], Mapping[str, object]] = dict,
) -> AsyncIterator[str]:
    """Serve `/metrics`, `/live`, `/ready` and `/health`; yields the URL.

    Args:
        port: 0 for any free one.
        started: `/health` answers 503 before that and 200 from then on.
        reasons: `/ready` answers 503 while there are any.
        facts: added to `/health`.
    """

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        why = list(reasons())
        return JSONResponse({"status": "unready" if why else "ready", "reasons": why}, 503 if why else 200)

    async def health(_: Request) -> Response:
        well = started()
        return JSONResponse({"status": "ok" if well else "starting", **facts()}, 200 if well else 503)

    # fastapi takes half a second to load
    pages = {"/metrics": metrics, "/live": live, "/ready": ready, "/health": health}
    app = Starlette(routes=[Route(path, page) for path, page in pages.items()])
    async with serve_http(app, _Page(host, port)) as url:
        yield url
