"""Errors in OpenAI's form: one table from mesh errors to (HTTP status, type, code)."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import BaseModel

from components import errors as e
from components.errors import MeshError, Overloaded


@dataclass(frozen=True, slots=True)
class Row:
    """Without `text`, clients get the error's own message, which must be safe to show."""

    status: int
    type: str
    code: str | None
    text: str | None = None


_INVALID: Final = "invalid_request_error"
_BUSY: Final = "service_unavailable_error"
_SERVER: Final = "server_error"
_NO_INSTANCE: Final = "No instance can serve this model at the moment. Try again shortly."
_STOPPING: Final = "The server stopped before this request had ended. Try again."
_TOO_MANY: Final = "Too many requests are waiting. Try again shortly."
_TOO_MANY_CHECKS: Final = "Too many schemas, expressions or grammars are waiting to be checked. Try again shortly."
_USED_UP: Final = "Rate limit reached for this API key. Try again later."
_LOST: Final = "The instance working on this request was lost. Try again."
_NOT_FINITE: Final = "The model computed NaN or infinite logits for this request, so no token can be drawn."
_OURS: Final = "The server had an error while processing the request."

TABLE: Final[dict[type[MeshError], Row]] = {
    e.MeshError: Row(500, _SERVER, "internal_error", _OURS),
    e.Rejected: Row(400, _INVALID, None),
    e.PromptTooLong: Row(400, _INVALID, "context_length_exceeded"),
    e.UnknownModel: Row(404, _INVALID, "model_not_found"),
    e.UnknownResponse: Row(404, _INVALID, "response_not_found"),
    e.MessageTooLarge: Row(413, _INVALID, "request_too_large", "The request is too large for the mesh."),
    e.MalformedMessage: Row(500, _SERVER, "internal_error", _OURS),  # a peer's message, not the client's
    e.IncompatibleLayout: Row(500, _SERVER, "internal_error", _OURS),
    e.Overloaded: Row(503, _BUSY, "overloaded", "The server is overloaded. Try again shortly."),
    e.NoDecodeInstance: Row(503, _BUSY, "no_instance", _NO_INSTANCE),
    e.NoBootstrapInstance: Row(503, _BUSY, "no_instance", _NO_INSTANCE),
    e.Stopping: Row(503, _BUSY, "stopping", _STOPPING),
    e.QueueFull: Row(429, "tokens", "rate_limit_exceeded", _TOO_MANY),  # the kind of limit, as in OpenAI's errors
    e.TooManyChecks: Row(429, "requests", "rate_limit_exceeded", _TOO_MANY_CHECKS),
    e.KeyLimited: Row(429, "tokens", "rate_limit_exceeded", _USED_UP),
    e.PeerLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.NobodyListens: Row(502, _SERVER, "instance_lost", _LOST),
    e.ListenerGone: Row(502, _SERVER, "instance_lost", _LOST),
    e.PrefillLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.DecodeLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.FramesLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.TransferFailed: Row(502, _SERVER, "instance_lost", _LOST),
    e.KvCorrupt: Row(502, _SERVER, "instance_lost", _LOST),
    e.StaleInstance: Row(502, _SERVER, "instance_lost", _LOST),
    e.KvUnavailable: Row(
        502, _SERVER, "kv_transfer_failed", "The prompt's KV was not received from its prefill instance"
    ),
    e.BackendUnavailable: Row(503, _BUSY, "backend_unavailable", "The server is not ready. Try again shortly."),
    e.DeadlineExceeded: Row(504, "timeout_error", "deadline_exceeded", "The request took longer than its time limit."),
    e.Cancelled: Row(499, _INVALID, "request_cancelled", "The request was cancelled."),
    e.InvariantBroken: Row(500, _SERVER, "internal_error", _OURS),
    e.IllegalTransition: Row(500, _SERVER, "internal_error", _OURS),
    e.PageLeak: Row(500, _SERVER, "internal_error", _OURS),
    e.PeerBroken: Row(500, _SERVER, "internal_error", _OURS),
    e.NonFiniteLogits: Row(500, _SERVER, "non_finite_logits", _NOT_FINITE),
}

IN_VAIN: Final = frozenset({"deadline_exceeded", "non_finite_logits"})  # a retry would repeat them

WHY_NO_KV: Final[dict[str, str]] = {  # by `KvUnavailable.fields["cause"]`
    e.KvCorrupt.__name__: "it was corrupted on the way.",
    e.DeadlineExceeded.__name__: "it took too long.",
    e.PrefillLost.__name__: "the instance was lost.",
    e.StaleInstance.__name__: "the instance was lost.",
    e.NobodyListens.__name__: "the instance was lost.",
    e.ListenerGone.__name__: "the instance was lost.",
    e.NoBootstrapInstance.__name__: "no bootstrap instance is available.",
    e.Overloaded.__name__: "the instance is full.",
    e.QueueFull.__name__: "the instance is full.",
    e.IncompatibleLayout.__name__: "its layout is not compatible.",
}

HTTP: Final[dict[int, tuple[str | None, str]]] = {  # refusals before a request reaches a dialect
    400: (None, "The request is malformed."),
    404: ("unknown_url", "Invalid URL. /openapi.json lists all routes, /v1/models the models."),
    401: (
        "invalid_api_key",
        "You didn't provide an API key. Send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'.",
    ),
    405: ("method_not_allowed", "Method not allowed for this URL."),
    408: ("request_timeout", "The request took too long to arrive."),
    413: ("request_too_large", "The request body is too large."),
    415: ("unsupported_media_type", "Send the body as JSON, with 'Content-Type: application/json'."),
    431: ("request_too_large", "The request's headers are too large."),
    503: ("overloaded", "The server is overloaded. Try again shortly."),
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every failed request."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ApiError:
    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    own_headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """JSON of a failed request, or of an event that ends a stream."""
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": inner}, ensure_ascii=False, separators=(",", ":")).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = dict(self.own_headers)
        if self.code in IN_VAIN:
            headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients would retry twice
        elif self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def from_mesh(error: MeshError, request_id: str) -> ApiError:
    """The client's error for a MeshError. A class without a row uses its nearest parent's."""
    row = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    message = row.text or error.message
    if isinstance(error, e.KvUnavailable):
        message = f"{message}: {WHY_NO_KV.get(str(error.fields.get('cause')), 'the transfer failed.')}"
    if isinstance(error, e.KeyLimited) and (limit := error.fields.get("limit")) is not None:
        wait_s = max(1, math.ceil(error.retry_after_s or 0))
        message = f"Rate limit reached for this API key: {limit}. Try again in {wait_s} s."
    if row.status >= 500:
        message = f"{message} (request {request_id})"
    param, code = error.fields.get("param"), error.fields.get("code", row.code)
    retry = error.retry_after_s if isinstance(error, Overloaded) else 1.0 if row.status == 503 else None
    kind = error.fields.get("kind") if isinstance(error, e.KeyLimited) else None
    return ApiError(row.status, message, _text(kind) or row.type, _text(param), _text(code), retry)


def in_other_words(error: ApiError, params: Mapping[str, str]) -> ApiError:
    """Rename the error's parameter by the first pattern that fits."""
    for pattern, name in params.items() if error.code != "unknown_parameter" else ():
        found = re.fullmatch(pattern, error.param or "")
        if found is not None:
            other = found.expand(name)
            return replace(error, message=error.message.replace(f"'{error.param}'", f"'{other}'"), param=other)
    return error


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def from_status(status: int, message: str | None = None, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error for a refusal by the web framework, such as a wrong method."""
    code, text = HTTP.get(status, (None, _OURS if status >= 500 else HTTP[400][1]))
    kind = _SERVER if status >= 500 else _INVALID
    return ApiError(status, message or text, kind, None, code, own_headers=headers or {})


def http_refusal(status: int, reason: str) -> tuple[bytes, bytes]:
    """Content type and body of a refusal by the HTTP server."""
    return b"application/json", from_status(status, reason).body()


def from_validation(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for an invalid parameter in the URL."""
    param = str(faults[0]["loc"][-1])
    return ApiError(400, f"Invalid '{param}': {faults[0]['msg']}.", _INVALID, param, "invalid_value")


def internal(request_id: str) -> ApiError:
    """The error for a bug. Only the log has the traceback."""
    return ApiError(500, f"{_OURS} (request {request_id})", _SERVER, None, "internal_error")
