"""A tracer whose spans go straight into a file, without the thread of the export."""

from pathlib import Path

from components.telemetry.light_span import LightSpan
from components.telemetry.span_export import pieces_of
from components.telemetry.spans import Spans
from components.telemetry.trace_store import Limits, TraceWriter


def writing_tracer(home: Path, service: str = "test", limits: Limits | None = None) -> tuple[Spans, TraceWriter]:
    writer = TraceWriter(home, limits or Limits())

    def write(span: LightSpan) -> None:
        writer.write(service, pieces_of([[span]]))

    return Spans(write), writer
