"""OpenTelemetry's metrics of generative-AI servers, sent over OTLP. Recorded once for each request, never per token.

Source: OpenTelemetry's semantic conventions for generative AI, "Metrics: model server".
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from opentelemetry.metrics import Histogram, Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from components.certificates import CA
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.telemetry.otlp_sender import trusting

OTLP: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"  # imported only with a collector
OTLP_TIMEOUT_S: Final = 2  # an unreachable collector must not delay a stop
EXPORT_EVERY_MS: Final = 10_000
DURATION_BUCKETS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class ServerMetrics:
    def __init__(self, meter: Meter, are_wanted: Callable[[], bool | None]) -> None:
        self._are_wanted = are_wanted

        def seconds(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = seconds("gen_ai.server.request.duration", "Duration of a request.", DURATION_BUCKETS)
        self._first = seconds(
            "gen_ai.server.time_to_first_token", "Time to the first token of successful requests.", FIRST_TOKEN_BUCKETS
        )
        self._each = seconds(
            "gen_ai.server.time_per_output_token",
            "Time per token after the first of successful requests.",
            TOKEN_BUCKETS,
        )

    def served(
        self,
        operation: str,
        model: str,
        *,
        duration_s: float,
        ttft_s: float | None,
        num_tokens: int,
        error: str | None,
    ) -> None:
        """Record one request.

        Args:
            operation: such as "chat".
            model: that answered; empty if the request named none of ours.
            duration_s: from acceptance to the last byte.
            ttft_s: from acceptance to the first token; None without one.
            num_tokens: generated.
            error: class of the error; None for a success.
        """
        if self._are_wanted() is False:
            return
        about = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvmesh"}
        about |= {"gen_ai.request.model": model, "gen_ai.response.model": model} if model else {}
        self._duration.record(duration_s, about | ({"error.type": error} if error else {}))
        if error or ttft_s is None:
            return
        self._first.record(ttft_s, about)
        if num_tokens > 1:
            self._each.record((duration_s - ttft_s) / (num_tokens - 1), about)


class ExportIfWanted(MetricExporter):
    """Exports nothing while it is not known whether the receiver takes metrics. What was recorded is exported later."""

    def __init__(self, exporter: MetricExporter, are_wanted: Callable[[], bool | None]) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._are_wanted = are_wanted

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any) -> MetricExportResult:
        if not self._are_wanted():
            return MetricExportResult.SUCCESS
        return self._exporter.export(metrics_data, timeout_millis, **options)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **options: Any) -> None:
        self._exporter.shutdown(timeout_millis, **options)


def _session(ca: Path | None) -> Any:
    """A session of `requests` that trusts the CAs that the span exporter trusts, and ignores REQUESTS_CA_BUNDLE.

    Raises: WrongSettings.
    """
    requests = import_module("requests")
    adapter = requests.adapters.HTTPAdapter()
    try:
        adapter.init_poolmanager(1, 1, ssl_context=trusting(ca))
    except OSError as exc:
        raise WrongSettings(f"{CA} {exc}") from exc
    session = requests.Session()
    session.mount("https://", adapter)
    return session


@asynccontextmanager
async def send_server_metrics(
    settings: MeshSettings, instance_id: str, are_wanted: Callable[[], bool | None]
) -> AsyncIterator[ServerMetrics | None]:
    """Yields None without a collector. `are_wanted`: whether it takes metrics; None: not known yet."""
    if not settings.otlp_endpoint:
        yield None
        return
    endpoint = f"{settings.otlp_endpoint.rstrip('/')}/v1/metrics"
    session = _session(settings.tls.ca) if endpoint.startswith("https:") else None
    exporter: MetricExporter = import_module(OTLP).OTLPMetricExporter(
        endpoint=endpoint, timeout=OTLP_TIMEOUT_S, session=session
    )
    wanted = ExportIfWanted(exporter, are_wanted)
    reader = PeriodicExportingMetricReader(wanted, EXPORT_EVERY_MS, OTLP_TIMEOUT_S * 1000)
    about = Resource.create({"service.name": "kvmesh-frontend", "service.instance.id": instance_id})
    provider = MeterProvider([reader], about, shutdown_on_exit=False)
    try:
        yield ServerMetrics(provider.get_meter("kvmesh"), are_wanted)
    finally:
        provider.shutdown(OTLP_TIMEOUT_S * 1000)
