"""The frontend's metrics, under vLLM's names. Labels come from fixed sets only."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.server_metrics import ServerMetrics

NO_MODEL: Final = ""  # label of requests for unknown models
TTFT_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
E2E_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
REFUSAL_REASONS: Final = ("full", "shed", "age", "draining")
SLOW_REASONS: Final = ("ttft", "tpot", "stall")
UNAUTHORIZED_REASONS: Final = ("missing", "wrong")
QUEUE_BUCKETS: Final = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
GAP_BUCKETS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40),  # a stream waits up to 30 s for a new instance
)


class GapCounts:
    """Gaps between tokens of one model: plain lists, since this runs per token."""

    __slots__ = ("counts", "num_tokens", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BUCKETS) + 1)
        self.total_s = 0.0
        self.num_tokens = 0  # including those of first pieces

    def observe(self, gap_s: float) -> None:
        self.counts[bisect_left(GAP_BUCKETS, gap_s)] += 1
        self.total_s += gap_s


class GapHistogram(Collector):
    """`inter_token_latency_seconds` and `generation_tokens_total`, collected from GapCounts."""

    def __init__(self) -> None:
        self._models: dict[str, GapCounts] = {}

    def of(self, model: str) -> GapCounts:
        return self._models.setdefault(model, GapCounts())

    @property
    def num_tokens(self) -> int:
        return sum(gaps.num_tokens for gaps in self._models.values())

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "kvmesh_inter_token_latency_seconds",
            "Gap between two pieces of a stream as they arrive.",
            labels=["model_name"],
        )
        bounds = [*map(str, GAP_BUCKETS), "+Inf"]
        for model, gaps in self._models.items():
            buckets = list(zip(bounds, map(float, accumulate(gaps.counts)), strict=True))
            family.add_metric([model], buckets=buckets, sum_value=gaps.total_s)
        yield family
        tokens = CounterMetricFamily(
            "kvmesh_generation_tokens", "Tokens generated, counted as they arrive.", labels=["model_name"]
        )
        for model, gaps in self._models.items():
            tokens.add_metric([model], gaps.num_tokens)
        yield tokens


class FrontendMetrics:
    def __init__(self, registry: CollectorRegistry, server: ServerMetrics | None = None) -> None:
        """`server`: OpenTelemetry's metrics, if a collector gets them."""
        self.server = server
        self.cached_tokens = 0  # of all prompts, found in a prefix cache; for the page at /ui
        self.registry = registry
        self.gaps = GapHistogram()
        registry.register(self.gaps)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        model, labels, by_key = ["model_name"], ["model_name", "route"], ["api_key"]  # a key's name
        self.time_to_first_token = histogram(
            "kvmesh_time_to_first_token_seconds",
            "Time from acceptance to the first token.",
            labels,
            buckets=TTFT_BUCKETS,
        )
        self.e2e_latency = histogram(
            "kvmesh_e2e_request_latency_seconds", "Time from acceptance to the last byte.", labels, buckets=E2E_BUCKETS
        )
        self.queue_time = histogram(
            "kvmesh_request_queue_time_seconds",
            "Time that admitted requests waited for admission.",
            buckets=QUEUE_BUCKETS,
        )
        self.running = Gauge(
            "kvmesh_num_requests_running",
            "Requests in progress, including those that wait for admission.",
            model,
            registry=registry,
        )
        self.prompt_tokens = counter(
            "kvmesh_prompt_tokens", "Prompt tokens, counted when the first token of the answer arrives.", model
        )
        self.requests = counter(
            "kvmesh_requests", "Requests by HTTP status; 499: the client left.", [*labels, "status"]
        )
        self.success = counter("kvmesh_request_success", "Choices by finish reason.", [*model, "finished_reason"])
        self.key_requests = counter("kvmesh_api_key_requests", "Requests accepted, by API key.", by_key)
        self.key_tokens = counter("kvmesh_api_key_tokens", "Prompt and answer tokens, by API key.", [*by_key, "kind"])
        self.limited = counter("kvmesh_api_key_limited", "Requests over the limits of their API key.", by_key)
        self.slow = self._by_reason(
            "kvmesh_requests_slow",
            "Slow requests: a late first token (ttft), slow tokens on average (tpot), or a long gap between two (stall).",
            SLOW_REASONS,
        )
        self.refused = self._by_reason(
            "kvmesh_requests_refused",
            "Requests not admitted: the queue was full, it was shed for a better one, it waited too long (age), or this "
            "frontend is draining.",
            REFUSAL_REASONS,
        )
        self.unauthorized = self._by_reason(
            "kvmesh_requests_unauthorized", "Requests without a valid API key.", UNAUTHORIZED_REASONS
        )

    def _by_reason(self, name: str, text: str, reasons: Sequence[str]) -> Counter:
        """Return a counter that is 0 for each reason at first, so that a rate can be taken from the start."""
        counter = Counter(name, text, ["reason"], registry=self.registry)
        for reason in reasons:
            counter.labels(reason)
        return counter

    def show_queue(self, num_requests: Callable[[], int], num_tokens: Callable[[], int]) -> None:
        waiting = Gauge("kvmesh_num_requests_waiting", "Requests that wait for admission.", registry=self.registry)
        waiting.set_function(num_requests)
        Gauge(
            "kvmesh_num_tokens_waiting",
            "Prompt tokens of the requests that wait for admission, plus 64 for each choice.",
            registry=self.registry,
        ).set_function(num_tokens)
