"""Every failure as the OpenAI API tells it: the one table from our errors to (HTTP status, type, code)."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import BaseModel

from components import errors as e
from components.errors import MeshError, Overloaded


@dataclass(frozen=True, slots=True)
class Row:
    """What a client is told. Without `text` it is the error's own message, which then must be fit for a stranger."""

    status: int
    type: str
    code: str | None
    text: str | None = None


_INVALID: Final = "invalid_request_error"
_BUSY: Final = "service_unavailable_error"
_SERVER: Final = "server_error"
_NO_INSTANCE: Final = "No instance can serve this model at the moment. Try again shortly."
_TOO_MANY: Final = "Too many requests are waiting. Try again shortly."
_TOO_MANY_CHECKS: Final = "Too many schemas, expressions or grammars are waiting to be checked. Try again shortly."
_USED_UP: Final = "This API key has used what it may for now. Try again later."
_LOST: Final = "The instance working on this request was lost. Try again."
_NOT_FINITE: Final = "The model computed NaN or infinite logits for this request, so no token can be drawn."
_OURS: Final = "The server had an error while processing the request."

TABLE: Final[dict[type[MeshError], Row]] = {
    e.MeshError: Row(500, _SERVER, "internal_error", _OURS),
    e.Rejected: Row(400, _INVALID, None),
    e.PromptTooLong: Row(400, _INVALID, "context_length_exceeded"),
    e.UnknownModel: Row(404, _INVALID, "model_not_found"),
    e.UnknownResponse: Row(404, _INVALID, "response_not_found"),
    e.MessageTooLarge: Row(413, _INVALID, "request_too_large", "The request is larger than the mesh carries."),
    e.MalformedMessage: Row(500, _SERVER, "internal_error", _OURS),  # a peer's bytes, never the client's
    e.IncompatibleLayout: Row(500, _SERVER, "internal_error", _OURS),
    e.Overloaded: Row(503, _BUSY, "overloaded", "The server is overloaded. Try again shortly."),
    e.NoDecodeInstance: Row(503, _BUSY, "no_instance", _NO_INSTANCE),
    e.NoPrefillInstance: Row(503, _BUSY, "no_instance", _NO_INSTANCE),
    e.NoBootstrapInstance: Row(503, _BUSY, "no_instance", _NO_INSTANCE),
    e.QueueFull: Row(429, "tokens", "rate_limit_exceeded", _TOO_MANY),  # what the limit is on, as OpenAI has it
    e.TooManyChecks: Row(429, "requests", "rate_limit_exceeded", _TOO_MANY_CHECKS),
    e.KeyLimited: Row(429, "tokens", "rate_limit_exceeded", _USED_UP),
    e.PeerLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.NobodyListens: Row(502, _SERVER, "instance_lost", _LOST),
    e.PrefillLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.DecodeLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.FramesLost: Row(502, _SERVER, "instance_lost", _LOST),
    e.TransferFailed: Row(502, _SERVER, "instance_lost", _LOST),
    e.KvCorrupt: Row(502, _SERVER, "instance_lost", _LOST),
    e.StaleInstance: Row(502, _SERVER, "instance_lost", _LOST),
    e.KvUnavailable: Row(502, _SERVER, "kv_transfer_failed", "The prompt's KV did not come from its prefill instance"),
    e.BackendUnavailable: Row(503, _BUSY, "backend_unavailable", "The server is not ready. Try again shortly."),
    e.DeadlineExceeded: Row(504, "timeout_error", "deadline_exceeded", "The request took longer than its time limit."),
    e.Cancelled: Row(499, _INVALID, "request_cancelled", "The request was cancelled."),
    e.InvariantBroken: Row(500, _SERVER, "internal_error", _OURS),
    e.IllegalTransition: Row(500, _SERVER, "internal_error", _OURS),
    e.PageLeak: Row(500, _SERVER, "internal_error", _OURS),
    e.PeerBroken: Row(500, _SERVER, "internal_error", _OURS),
    e.NonFiniteLogits: Row(500, _SERVER, "non_finite_logits", _NOT_FINITE),
}

WHY_NO_KV: Final[dict[str, str]] = {  # by the class in `KvUnavailable`'s field `cause`
    e.KvCorrupt.__name__: "it did not arrive as it was sent.",
    e.DeadlineExceeded.__name__: "it took too long.",
    e.PrefillLost.__name__: "the instance was lost.",
    e.StaleInstance.__name__: "the instance was lost.",
    e.NoBootstrapInstance.__name__: "no bootstrap instance is there to pair it with.",
    e.Overloaded.__name__: "the instance takes no more.",
    e.QueueFull.__name__: "the instance takes no more.",
    e.IncompatibleLayout.__name__: "it is not laid out as decode needs it.",
}

HTTP: Final[dict[int, tuple[str | None, str]]] = {  # what the web server refuses before a request is one of ours
    400: (None, "The request is malformed."),
    404: ("unknown_url", "There is nothing at this URL. /openapi.json lists all, /v1/models the models."),
    401: ("invalid_api_key", "Send a good API key: 'Authorization: Bearer <key>' or 'x-api-key: <key>'."),
    405: ("method_not_allowed", "This URL does not take this method."),
    408: ("request_timeout", "The request took too long to come."),
    413: ("request_too_large", "The request body is too large."),
    415: ("unsupported_media_type", "Send the body as JSON, with 'Content-Type: application/json'."),
    431: ("request_too_large", "The request's headers are too large."),
    503: ("overloaded", "The server is overloaded. Try again shortly."),
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is none; for the description of this API."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ApiError:
    """One failure, ready to send."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> bytes:
        """The JSON that a failed request is answered with, and that a broken stream carries as an event."""
        inner = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": inner}, ensure_ascii=False, separators=(",", ":")).encode()

    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the status."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def from_mesh(error: MeshError, request_id: str) -> ApiError:
    """How the client is told of `error`. A class of a newer peer that is not in the table is told as its nearest kin."""
    row = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    message = row.text or error.message
    if isinstance(error, e.KvUnavailable):
        message = f"{message}: {WHY_NO_KV.get(str(error.fields.get('cause')), 'the transfer failed.')}"
    if row.status >= 500:
        message = f"{message} (request {request_id})"
    param, code = error.fields.get("param"), error.fields.get("code", row.code)
    retry = error.retry_after_s if isinstance(error, Overloaded) else 1.0 if row.status == 503 else None
    kind = error.fields.get("kind") if isinstance(error, e.KeyLimited) else None
    return ApiError(row.status, message, _text(kind) or row.type, _text(param), _text(code), retry)


def in_other_words(error: ApiError, params: Mapping[str, str]) -> ApiError:
    """`error` as an API tells it that calls parameters otherwise: of the patterns in `params` the first that fits counts.

    A parameter that is not known is the client's own word.
    """
    for pattern, name in params.items() if error.code != "unknown_parameter" else ():
        found = re.fullmatch(pattern, error.param or "")
        if found is not None:
            other = found.expand(name)
            return replace(error, message=error.message.replace(f"'{error.param}'", f"'{other}'"), param=other)
    return error


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def from_status(status: int, message: str | None = None) -> ApiError:
    """A refusal by the web server: unknown URL, wrong method, wrong content type."""
    code, text = HTTP.get(status, (None, _OURS if status >= 500 else HTTP[400][1]))
    return ApiError(status, message or text, _SERVER if status >= 500 else _INVALID, None, code)


def http_refusal(status: int, reason: str) -> tuple[bytes, bytes]:
    """Return content type and body of a refusal by the HTTP server, for `serve_http`."""
    return b"application/json", from_status(status, reason).body()


def from_validation(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """A refusal of a parameter in the URL."""
    param = str(faults[0]["loc"][-1])
    return ApiError(400, f"Invalid '{param}': {faults[0]['msg']}.", _INVALID, param, "invalid_value")


def internal(request_id: str) -> ApiError:
    """Anything else: our bug. The traceback is in the log under the request id, and only there."""
    return ApiError(500, f"{_OURS} (request {request_id})", _SERVER, None, "internal_error")
