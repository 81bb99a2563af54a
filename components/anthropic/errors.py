"""Errors of Anthropic's API, made from OpenAI's, so that one table holds all causes."""

from typing import Final

from components.openai.errors import ApiError
from components.openai.events import as_json

OVERLOADED: Final = 529  # Anthropic's own status; its clients retry after it
TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def body_of(error: ApiError, request_id: str) -> bytes:
    """Return the JSON of a failed request, or of an event that ends a stream."""
    status = status_of(error)
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return as_json(
        {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": f"req_{request_id}"}
    )
