"""The spans of the HTTP side, with OpenTelemetry's GenAI attributes."""

from http import HTTPStatus
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import Scope

from components.errors import Cancelled
from components.openai.errors import ApiError
from components.openai.fields import GenerationFields
from components.telemetry import spans
from components.telemetry.light_span import LightSpan
from components.telemetry.trace_pieces import CLIENT_REQUEST_ID, REFUSED, REQUEST_ID, ROUTE, TENANT
from services.frontend.gate import caller_of
from services.frontend.generation import Generation
from services.frontend.request_timeline import RequestTimeline, unkept_timeline

tracer: Final = spans.tracer

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")


def begin_timeline(scope: Scope, operation: str, request_id: str, label: str, phase: str) -> RequestTimeline:
    """Begin a request in `phase`, in the client's trace if there is one. `label`: the client's own name of the request."""
    carrier = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
    }
    facts = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvmesh", ROUTE: scope["path"]}
    facts[REQUEST_ID] = request_id
    if label:
        facts[CLIENT_REQUEST_ID] = label
    if (account := caller_of(scope).account) is not None:
        facts[TENANT] = account.tenant
    # an empty context, not that of an earlier request
    context = tracer.continue_trace(carrier) if "traceparent" in carrier else Context()
    span = tracer.start_span(operation, context, SpanKind.SERVER, facts)
    if isinstance(span, LightSpan):
        return RequestTimeline(span, span, phase)
    return unkept_timeline(span, operation, facts, phase)


def describe_request(
    timeline: RequestTimeline, operation: str, request: GenerationFields, max_tokens: int | None
) -> None:
    """Name the span, once the model is known to be ours, and add the request's parameters."""
    if not timeline.is_kept:
        return
    timeline.root.update_name(f"{operation} {request.model}")
    wanted = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.stop_sequences": request.stop or None,
    }
    timeline.root.set_attributes({name: value for name, value in wanted.items() if value is not None})


def describe_response(timeline: RequestTimeline, response_id: str, model: str, generation: Generation) -> None:
    if not timeline.is_kept:
        return
    usage = generation.usage()
    timeline.root.set_attributes(
        {
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [c.finish for c in generation.choices if c.finish is not None],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        }
    )


def describe_error(timeline: RequestTimeline, error: ApiError, exc: Exception) -> None:
    """Record how the request failed. Only a server's fault makes the span's status an error (OpenTelemetry's rule)."""
    timeline.failed(exc, error)
    if isinstance(exc, Cancelled):
        timeline.root.set_attribute("kvmesh.cancelled", error.message)
        return
    timeline.root.set_attributes({"error.type": type(exc).__name__, "http.response.status_code": error.status})
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        timeline.root.set_attribute(REFUSED, error.message)
    else:
        timeline.root.set_status(Status(StatusCode.ERROR, error.message))
