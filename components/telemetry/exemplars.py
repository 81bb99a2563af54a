"""Exemplars: links from a bucket of a latency histogram to a trace that was counted in it."""

from opentelemetry.trace import Span, format_trace_id

from components.telemetry.light_span import LightSpan


def exemplar_of(span: Span) -> dict[str, str] | None:
    """Return the exemplar's labels, or None if the trace is not sampled."""
    return {"trace_id": format_trace_id(span.trace_id)} if isinstance(span, LightSpan) and span.flags else None
