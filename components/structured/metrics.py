"""Metrics of the compilation of constraints."""

from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

Result = Literal["compiled", "cached", "refused"]
RESULTS: Final[tuple[Result, ...]] = ("compiled", "cached", "refused")
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ConstraintMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvmesh_structured_output_compile_seconds",
            "Time to compile or refuse a constraint that was not cached.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            "kvmesh_structured_output_requests",
            "Constraints requested, by result.",
            ["result"],
            registry=registry,
        )
        for result in RESULTS:
            self._requests.labels(result)

    def count(self, result: Result, seconds: float | None = None) -> None:
        """`seconds`: compile time, if it was compiled or refused for this request."""
        self._requests.labels(result).inc()
        if seconds is not None:
            self._seconds.observe(seconds)
