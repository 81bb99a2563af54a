"""A worker's metrics, under vLLM's names where they exist. Nothing here runs per token."""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from components.errors import Cancelled, MeshError
from components.telemetry.figures import Batch, Figures
from components.telemetry.links import Links
from components.telemetry.on_demand import OnDemand
from components.wire.status import PageStatus
from components.wire.step_stats import StepStats

STEP_BUCKETS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
TRANSFER_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.links = Links()
        self.num_exposed_pages: Callable[[], int] = int
        self.num_prompt_tokens = 0  # computed here
        self.num_generated_tokens = 0
        self._latest: StepStats | None = None
        shown = self._shown = OnDemand(self.registry)
        shown.gauge("kvmesh_num_requests_running", "Requests in the batch.", lambda: self.batch().running)
        shown.gauge("kvmesh_num_requests_waiting", "Requests queued for pages or budget.", lambda: self.batch().waiting)
        shown.gauge(
            "kvmesh_kv_cache_usage_perc", "Share of KV pages that requests hold, 0 to 1.", self._of_step(_usage)
        )
        shown.counter(
            "kvmesh_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            self._of_step(lambda step: step.prefix_queries),
        )
        shown.counter(
            "kvmesh_prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            self._of_step(lambda step: step.prefix_hits),
        )
        shown.gauge(
            "kvmesh_kv_offloaded_pages",
            "Evicted KV pages that are kept in main memory.",
            self._of_step(lambda step: step.offloaded_pages),
        )
        shown.counter(
            "kvmesh_kv_restored_pages",
            "KV pages restored from main memory for a prompt.",
            self._of_step(lambda step: step.restored_pages),
        )
        shown.counter(
            "kvmesh_kv_loaded_pages",
            "KV pages loaded from files for a prompt.",
            self._of_step(lambda step: step.loaded_pages),
        )
        shown.counter("kvmesh_kv_saved_pages", "KV pages saved to files.", self._of_step(lambda step: step.saved_pages))
        shown.gauge(
            "kvmesh_kv_unsaved_pages",
            "KV pages that wait to be saved to files.",
            self._of_step(lambda step: step.unsaved_pages),
        )
        shown.counter(
            "kvmesh_spec_decode_num_draft_tokens",
            "Drafts that steps checked (speculative decoding).",
            self._of_step(lambda step: step.drafted_tokens),
        )
        shown.counter(
            "kvmesh_spec_decode_num_accepted_tokens",
            "Drafts that were accepted.",
            self._of_step(lambda step: step.accepted_tokens),
        )
        shown.counter("kvmesh_prompt_tokens", "Prompt tokens computed here.", lambda: self.num_prompt_tokens)
        shown.counter("kvmesh_generation_tokens", "Tokens sampled here.", lambda: self.num_generated_tokens)
        self._steps = Histogram(
            "kvmesh_engine_step_seconds", "Duration of an engine step.", buckets=STEP_BUCKETS, registry=self.registry
        )
        self._transfer_s = Histogram(
            "kvmesh_kv_transfer_seconds",
            "Duration of a completed transfer, from decode's offer of its pages to its end as this worker sees it.",
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        )
        self._transfer_bytes = self._counter("kvmesh_kv_transfer_bytes", "KV bytes of completed transfers.")
        self._transfers = self._counter(
            "kvmesh_kv_transfers",
            "Transfers by outcome (completed, failed, cancelled: the client had gone) and the error of a failed one. "
            "A refusal counts only if no other prefill instance takes the prompt.",
            "outcome",
            "cause",
        )
        self._completed, _, self._cancelled = (
            self._transfers.labels(outcome, "") for outcome in ("completed", "failed", "cancelled")
        )

    def record(self, figures: StepStats) -> None:
        """Count a step's tokens and duration; other figures are read on demand."""
        self._latest = figures
        self.num_prompt_tokens += figures.prompt_tokens
        self.num_generated_tokens += figures.decode_tokens
        if figures.prompt_tokens or figures.decode_tokens:
            self._steps.observe(figures.step_s)

    def show(self, figures: Figures) -> None:
        figures.links = self.links
        figures.pages = self.pages
        figures.batch = self.batch
        figures.loop.total = (
            (lambda: self.num_prompt_tokens) if figures.role == "prefill" else lambda: self.num_generated_tokens
        )

    def batch(self) -> Batch:
        return Batch() if self._latest is None else Batch(self._latest.num_running, self._latest.num_waiting)

    def pages(self) -> PageStatus | None:
        """None: the engine is starting."""
        if (step := self._latest) is None:
            return None
        return PageStatus(
            total=step.total_pages,
            free=step.free_pages,
            cached=step.cached_pages,
            held=step.held_pages,
            exposed=self.num_exposed_pages(),
        )

    def show_ranks(self, ranks: int) -> None:
        self._shown.gauge("kvmesh_engine_ranks", "Devices that hold the model together.", lambda: ranks)

    def show_kv_events(self, batches: Callable[[], int], dropped: Callable[[], int]) -> None:
        self._shown.counter("kvmesh_kv_event_batches", "Batches of KV events, numbered.", batches)
        self._shown.counter(
            "kvmesh_kv_event_batches_dropped", "Batches of KV events not sent; routers then request a dump.", dropped
        )

    def transferred(
        self, peer: str, num_bytes: int, duration_s: float, exemplar: Mapping[str, str] | None = None
    ) -> None:
        """Count a completed transfer. `exemplar`: labels of its trace."""
        self.links.transferred(peer, num_bytes, duration_s)
        self._completed.inc()
        self._transfer_bytes.inc(num_bytes)
        self._transfer_s.observe(duration_s, None if exemplar is None else dict(exemplar))

    def transfer_failed(self, peer: str, error: MeshError) -> None:
        if isinstance(error, Cancelled):
            self._cancelled.inc()
        else:
            self.links.failed(peer)
            self._transfers.labels("failed", type(error).__name__).inc()

    def _of_step(self, figure: Callable[[StepStats], float]) -> Callable[[], float]:
        return lambda: 0 if self._latest is None else figure(self._latest)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


def _usage(step: StepStats) -> float:
    return 1 - (step.free_pages + step.cached_pages) / max(1, step.total_pages)
