"""Failures as Anthropic's API tells them: made from those that the OpenAI API tells, so that there is one table of causes."""

from typing import Final

from components.openai.errors import ApiError
from components.openai.events import as_json

OVERLOADED: Final = 529  # Anthropic's own status, which its clients wait and try again for
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
    """The HTTP status."""
    return OVERLOADED if error.status == 503 else error.status


def body_of(error: ApiError, request_id: str) -> bytes:
    """The JSON that a failed request is answered with, and that a broken stream carries as an event."""
    status = status_of(error)
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return as_json(
        {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": f"req_{request_id}"}
    )
