"""Failures in the shape of the API that a path belongs to, for who answers before a dialect is there."""

from components.openai.errors import ApiError
from services.frontend.dialects.messages import MessagesDialect, refusal


def in_shape_of(path: str, error: ApiError, request_id: str) -> tuple[int, bytes]:
    """Status and JSON of a request for `path` that failed."""
    if path.startswith(MessagesDialect.route):
        return refusal(error, request_id)
    return error.status, error.body()
