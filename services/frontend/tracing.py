"""The spans of the HTTP side, with OpenTelemetry's GenAI attributes."""

from contextlib import AbstractContextManager, nullcontext
from time import time_ns
from types import TracebackType
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span
from starlette.types import Scope

from components.errors import Cancelled
from components.openai.errors import ApiError
from components.openai.fields import GenerationFields
from components.telemetry import spans
from components.telemetry.light_span import LightSpan
from components.telemetry.trace_store import TENANT, TTFT
from services.frontend.gate import caller_of
from services.frontend.generation import Generation

tracer: Final = spans.tracer

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")


def request_span(scope: Scope, operation: str, request_id: str, label: str = "") -> AbstractContextManager[Span]:
    """The root span of a request, in the client's trace if there is one. `label`: the client's own name of the request."""
    carrier = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
    }
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvmesh",
        "kvmesh.request_id": request_id,
        **({"kvmesh.client_request_id": label} if label else {}),
        **({TENANT: account.tenant} if (account := caller_of(scope).account) is not None else {}),
    }
    return tracer.start_as_current_span(
        operation,
        context=tracer.continue_trace(carrier)
        if "traceparent" in carrier
        else Context(),  # not that of an earlier request
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,  # the request's edge turns each error into a status
        set_status_on_exception=False,
    )


def phase(name: str, start_ns: int | None = None) -> AbstractContextManager[Span]:
    """A step of the current request. It begins where the step before it ended: no time is left out between two."""
    request = get_current_span()
    if not isinstance(request, LightSpan):
        return nullcontext(request)
    return _Phase(request, request.child(name, start_time=start_ns or request.reached))


class _Phase(spans.CurrentSpan):
    __slots__ = ("_request", "_step")

    def __init__(self, request: LightSpan, step: LightSpan) -> None:
        super().__init__(step, True, True, True)
        self._request, self._step = request, step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._request.reached = self._step.end_time or time_ns()


def record_phase(request: Span, name: str) -> None:
    """The step that ends now."""
    if isinstance(request, LightSpan):
        now_ns = time_ns()
        spans.record_span(name, request.reached, now_ns, parent=request)
        request.reached = now_ns


def describe_request(span: Span, operation: str, request: GenerationFields, max_tokens: int | None) -> None:
    """Name the span, once the model is known to be ours, and add the request's parameters."""
    span.update_name(f"{operation} {request.model}")
    if not span.is_recording():
        return
    wanted = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.stop_sequences": request.stop or None,
    }
    span.set_attributes({name: value for name, value in wanted.items() if value is not None})


def describe_first_token(ttft_s: float) -> None:
    """Add the time to first token to the request's span, which is the current one."""
    get_current_span().set_attribute(TTFT, round(ttft_s, 6))


def describe_response(span: Span, response_id: str, model: str, generation: Generation) -> None:
    if not span.is_recording():
        return
    usage = generation.usage()
    span.set_attributes(
        {
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [c.finish for c in generation.choices if c.finish is not None],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        }
    )


def describe_error(span: Span, error: ApiError, kind: str) -> None:
    """Add how the request failed. `kind`: the class of the exception. A client that left is no failure."""
    if kind == Cancelled.__name__:
        span.set_attribute("kvmesh.cancelled", error.message)
        return
    span.set_attributes({"error.type": kind, "http.response.status_code": error.status})
    span.set_status(Status(StatusCode.ERROR, error.message))
