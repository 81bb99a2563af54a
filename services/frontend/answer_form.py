"""What all answers of an API have in common: the headers and the form of errors."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

from components.errors import InvariantBroken, MeshError
from components.openai.errors import ApiError, from_mesh, from_status, internal
from services.frontend.reply import Headers

log = logging.getLogger(__name__)


class AnswerForm:
    """The form of one request's answer, in OpenAI's API. Other APIs override what differs."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def headers(self, shown_id: str) -> Headers:
        """`shown_id`: the request's id for the client."""
        return [(b"x-request-id", shown_id.encode())]

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON of a failed request."""
        return error.status, error.body()

    def failure(self, error: ApiError, shown_id: str) -> Response:
        """Return the whole answer to a failed request."""
        status, body = self.refusal(error)
        response = Response(body, status, media_type="application/json")
        response.raw_headers += [*self.headers(shown_id), *error.headers()]
        return response


Forms = Mapping[str, type[AnswerForm]]  # by prefix of the path; OpenAI's elsewhere


def form_at(forms: Forms, path: str) -> type[AnswerForm]:
    return next((form for prefix, form in forms.items() if path.startswith(prefix)), AnswerForm)


def error_of(exc: Exception, request_id: str) -> ApiError:
    """Return the error that a client gets for `exc`. A bug is logged with its traceback."""
    if isinstance(exc, InvariantBroken) or not isinstance(exc, MeshError | HTTPException):
        log.error("request failed", exc_info=exc)
    if isinstance(exc, MeshError):
        return from_mesh(exc, request_id)
    if isinstance(exc, HTTPException):
        filled_in = exc.detail == HTTPStatus(exc.status_code).phrase  # starlette's default if there is no message
        return from_status(exc.status_code, None if filled_in else exc.detail, exc.headers)
    return internal(request_id)
