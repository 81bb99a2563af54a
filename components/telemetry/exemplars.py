"""Exemplars: they lead from a bucket of a latency histogram to a trace that fell into it."""

from opentelemetry.trace import Span, format_trace_id


def exemplar_of(span: Span) -> dict[str, str] | None:
    """None if the trace is not kept."""
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id)} if context.is_valid and context.trace_flags.sampled else None
