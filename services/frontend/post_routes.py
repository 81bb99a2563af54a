"""The routes that take a JSON body. `services.frontend.exchange` serves those that generate text."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from components.anthropic.messages import CountRequest, MessageObject, MessagesRequest, TokenCountAnswer
from components.openai.chat import ChatCompletion, ChatRequest
from components.openai.completions import Completion, CompletionRequest
from components.openai.embeddings import EmbeddingList, EmbeddingRequest
from components.openai.parts import Parts
from components.openai.responses import InputTokens, InputTokensRequest, ResponseObject, ResponsesRequest
from components.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.frontend.answer_form import Forms, form_at
from services.frontend.dialects.chat import ChatDialect
from services.frontend.dialects.completions import CompletionDialect
from services.frontend.dialects.dialect import Dialect
from services.frontend.dialects.messages import COUNT_ROUTE, MessagesDialect
from services.frontend.dialects.responses import ResponsesDialect
from services.frontend.embeddings import embed
from services.frontend.exchange import Exchange, Frontend
from services.frontend.openapi import PostRoute
from services.frontend.stored import StoredResponses
from services.frontend.unary import Call, answered, count_input_tokens, count_tokens, detokenize, tokenize

B = TypeVar("B", bound=BaseModel)

FORMS: Final[Forms] = {MessagesDialect.route: MessagesDialect}


class _Exchanges:
    """An ASGI application that creates an `Exchange` for each request."""

    def __init__(self, frontend: Frontend, dialect: Callable[[str], Dialect]) -> None:
        self._frontend = frontend
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self._frontend, self._dialect)(scope, receive, send)


def generating_routes(frontend: Frontend, stored: StoredResponses | None) -> list[PostRoute]:
    return [
        PostRoute(
            ChatDialect.route,
            _Exchanges(frontend, ChatDialect),
            ChatRequest,
            ChatCompletion,
            "chat_completions",
            "Answer a conversation; with `stream`, as server-sent events.",
            streams=True,
        ),
        PostRoute(
            CompletionDialect.route,
            _Exchanges(frontend, CompletionDialect),
            CompletionRequest,
            Completion,
            "completions",
            "Continue one or several texts; with `stream`, as server-sent events.",
            streams=True,
        ),
        PostRoute(
            ResponsesDialect.route,
            _Exchanges(frontend, partial(ResponsesDialect, stored)),
            ResponsesRequest,
            ResponseObject,
            "responses",
            "Answer a conversation in items; with `stream`, as server-sent events; with `background`, at once.",
            streams=True,
        ),
        PostRoute(
            MessagesDialect.route,
            _Exchanges(frontend, MessagesDialect),
            MessagesRequest,
            MessageObject,
            "messages",
            "Answer a conversation as Anthropic's API does; with `stream`, as server-sent events.",
            streams=True,
        ),
    ]


def unary_routes(frontend: Frontend, stored: StoredResponses | None) -> list[PostRoute]:
    def route(
        path: str,
        body: type[B],
        answer: type[BaseModel],
        work: Callable[[Call, B], Awaitable[Parts]],
        *,
        name: str,
        description: str,
        operation: str = "",
    ) -> PostRoute:
        form = form_at(FORMS, path)

        async def endpoint(request: Request) -> Response:
            return await answered(frontend, request, body, work, operation=operation or name, form=form)

        return PostRoute(path, endpoint, body, answer, name, description)

    return [
        route(
            "/v1/embeddings",
            EmbeddingRequest,
            EmbeddingList,
            embed,
            name="embeddings",
            description="The vectors of one or several texts, computed by an embedding model.",
        ),
        route(
            COUNT_ROUTE,
            CountRequest,
            TokenCountAnswer,
            count_tokens,
            name="count",
            description="How many tokens a message's prompt has.",
            operation="count_tokens",
        ),
        route(
            f"{ResponsesDialect.route}/input_tokens",
            InputTokensRequest,
            InputTokens,
            partial(count_input_tokens, stored),
            name="input_tokens",
            description="How many tokens a response's prompt has.",
            operation="count_tokens",
        ),
        route(
            "/tokenize",
            TokenizeRequest,
            Tokenized,
            tokenize,
            name="tokenize",
            description="Token ids of a text, or of a conversation in the model's template.",
        ),
        route(
            "/detokenize",
            DetokenizeRequest,
            Detokenized,
            detokenize,
            name="detokenize",
            description="The text of token ids.",
        ),
    ]
