"""The logs and traces of a process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource

from components.settings import MeshSettings
from components.telemetry.held_traces import KEPT_PER_S, HeldTraces
from components.telemetry.logs import configure_logs
from components.telemetry.otlp_sender import OtlpSender
from components.telemetry.span_export import SpanExport
from components.telemetry.spans import tracer
from components.telemetry.trace_store import TraceWriter
from components.token_bucket import TokenBucket


class _Provider(trace.TracerProvider):
    """Gives our tracer to libraries."""

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        return tracer


@dataclass(frozen=True, slots=True)
class Telemetry:
    held: HeldTraces
    export: SpanExport

    @property
    def dropped(self) -> Mapping[str, int]:
        return {**self.export.dropped, "tail_limit": self.held.over_limit}


@asynccontextmanager
async def start_telemetry(
    settings: MeshSettings, role: str, instance_id: str, ranks: int = 1
) -> AsyncIterator[Telemetry]:
    """`ranks`: number of a worker's devices."""
    configure_logs(settings.log_level, settings.log_format)
    about: dict[str, str | int] = {"service.name": f"kvmesh-{role}", "service.instance.id": instance_id}
    if ranks > 1:
        about["kvmesh.ranks"] = ranks
    resource = Resource.create(about)
    sender = OtlpSender(settings.otlp_endpoint, settings.tls.ca) if settings.otlp_endpoint else None
    export = SpanExport(f"{role}-{instance_id}", resource.attributes, TraceWriter(settings.home), sender)
    held = HeldTraces(export.put, TokenBucket(KEPT_PER_S))
    trace.set_tracer_provider(_Provider())
    tracer.limit(TokenBucket(settings.traces_per_s))
    export.start()
    tracer.record_to(held.take, holds=settings.trace_tail, held_per_s=settings.traces_held_per_s)
    try:
        yield Telemetry(held, export)
    finally:
        tracer.record_to(None, holds=False)
        export.stop()
