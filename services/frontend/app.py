"""The HTTP routes. What a generating request does is in `services.frontend.exchange`."""

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from components.anthropic.messages import CountRequest, MessageObject, MessagesRequest, TokenCountAnswer
from components.errors import MeshError
from components.messaging.service import VERSION
from components.openai.chat import ChatCompletion, ChatRequest
from components.openai.completions import Completion, CompletionRequest
from components.openai.embeddings import EmbeddingList, EmbeddingRequest
from components.openai.errors import ApiError, from_mesh, from_status, from_validation, internal
from components.openai.models import ModelCard, ModelList
from components.openai.operations import Health, Live, Readiness, Version, WorkerList
from components.openai.responses import ResponseObject, ResponsesRequest
from components.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from components.structured.checker import ConstraintChecker
from components.text.sampling_defaults import SamplingDefaults
from components.text.tokenizer import TextModel
from services.frontend.admission import Admission
from services.frontend.config import FrontendSettings
from services.frontend.dialects.chat import ChatDialect
from services.frontend.dialects.completions import CompletionDialect
from services.frontend.dialects.messages import COUNT_ROUTE, MessagesDialect
from services.frontend.dialects.responses import ResponsesDialect
from services.frontend.embeddings import embed
from services.frontend.exchange import Exchange, Frontend
from services.frontend.gate import Gate, caller_of
from services.frontend.keys import KeyRing
from services.frontend.metrics import FrontendMetrics
from services.frontend.operations import Operations
from services.frontend.ports import Mesh, ServedModel
from services.frontend.prompts import find_model
from services.frontend.response_routes import add_response_routes
from services.frontend.schema import EVENTS, describe
from services.frontend.shape import in_shape_of
from services.frontend.sites import Sites
from services.frontend.stored import StoredResponses
from services.frontend.unary import answered, count_tokens, detokenize, tokenize

EXPOSED: Final = [  # headers that a page's script may see
    "x-request-id",
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]


def create_app(
    mesh: Mesh,
    text: TextModel,
    settings: FrontendSettings,
    registry: CollectorRegistry | None = None,
    defaults: SamplingDefaults | None = None,
    *,
    keys: KeyRing | None = None,
    stored: StoredResponses | None = None,
    checker: ConstraintChecker | None = None,
    operations: Operations | None = None,
) -> FastAPI:
    """The OpenAI endpoint over `mesh`.

    Args:
        mesh: who generates.
        text: tokenizer and chat template.
        settings: limits.
        registry: shown by `/metrics` beside the frontend's own figures.
        defaults: sampling parameters where a request has none.
        keys: that requests must bring; None: they need none.
        stored: where responses are kept; None: they are not.
        checker: of what answers are asked to be; without one, requests that ask are refused.
        operations: what is told of this process and of the mesh; by default what `mesh` alone knows.
    """
    app = FastAPI(
        title="kvmesh",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # our own spans say more, and cost less
    )
    metrics = FrontendMetrics(registry or CollectorRegistry())
    admission = Admission(mesh, settings, metrics)
    frontend = Frontend(mesh, text, settings, defaults or SamplingDefaults(), metrics, admission, checker)
    _add_generation(app, frontend, stored)
    add_response_routes(app, stored)
    _add_one_piece(app, frontend)
    _add_models(app, mesh)
    _add_operations(app, mesh, operations or Operations(mesh), metrics.registry)
    _add_error_handlers(app)
    sites = Sites(settings.allowed_hosts, settings.cors_origins, settings.host)
    app.add_middleware(Gate, ring=keys, metrics=metrics, sites=sites)
    _allow_origins(app, settings.cors_origins)  # outermost: a preflight request brings no key
    describe(app, BODIES)
    return app


BODIES: Final[dict[str, type[BaseModel]]] = {
    ChatDialect.route: ChatRequest,
    CompletionDialect.route: CompletionRequest,
    ResponsesDialect.route: ResponsesRequest,
    MessagesDialect.route: MessagesRequest,
    COUNT_ROUTE: CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class _Straight:
    """Takes generating requests past routing, dependencies and exception handlers, a seventh of a frontend's time: an exchange
    reads its own request and ends in its own errors.
    """

    def __init__(self, app: ASGIApp, exchanges: Mapping[str, Callable[[], ASGIApp]]) -> None:
        self._app = app
        self._exchanges = exchanges  # by path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is none of these."""
        make = self._exchanges.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (self._app if make is None else make())(scope, receive, send)


class _Passed(Response):
    """An ASGI application in the place of a route's response."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _add_generation(app: FastAPI, frontend: Frontend, stored: StoredResponses | None) -> None:
    exchanges: dict[str, Callable[[], ASGIApp]] = {
        ChatDialect.route: lambda: Exchange(frontend, ChatDialect),
        CompletionDialect.route: lambda: Exchange(frontend, CompletionDialect),
        ResponsesDialect.route: lambda: Exchange(frontend, partial(ResponsesDialect, stored)),
        MessagesDialect.route: lambda: Exchange(frontend, MessagesDialect),
    }
    app.add_middleware(_Straight, exchanges=exchanges)

    # For the description of this API, and whoever mounts the application below a path.
    @app.post(ChatDialect.route, responses={200: {"model": ChatCompletion, "content": EVENTS}})
    async def chat_completions() -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        return _Passed(exchanges[ChatDialect.route]())

    @app.post(CompletionDialect.route, responses={200: {"model": Completion, "content": EVENTS}})
    async def completions() -> Response:
        """Continue one or several texts; with `stream`, as server-sent events."""
        return _Passed(exchanges[CompletionDialect.route]())

    @app.post(ResponsesDialect.route, responses={200: {"model": ResponseObject, "content": EVENTS}})
    async def responses() -> Response:
        """Answer a conversation in items; with `stream`, as server-sent events; with `background`, at once."""
        return _Passed(exchanges[ResponsesDialect.route]())

    @app.post(MessagesDialect.route, responses={200: {"model": MessageObject, "content": EVENTS}})
    async def messages() -> Response:
        """Answer a conversation as Anthropic's API does; with `stream`, as server-sent events."""
        return _Passed(exchanges[MessagesDialect.route]())


def _add_one_piece(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/embeddings", responses={200: {"model": EmbeddingList}})
    async def embeddings(request: Request) -> Response:
        """The vectors of one or several texts, of a model that is meant for that."""
        return await answered(frontend, request, EmbeddingRequest, embed, "embeddings")

    @app.post(COUNT_ROUTE, responses={200: {"model": TokenCountAnswer}})
    async def count(request: Request) -> Response:
        """How many tokens a message's prompt has."""
        return await answered(frontend, request, CountRequest, count_tokens, "count_tokens")

    @app.post("/tokenize", responses={200: {"model": Tokenized}})
    async def tokenized(request: Request) -> Response:
        """Token ids of a text, or of a conversation in the model's template."""
        return await answered(frontend, request, TokenizeRequest, tokenize, "tokenize")

    @app.post("/detokenize", responses={200: {"model": Detokenized}})
    async def detokenized(request: Request) -> Response:
        """The text of token ids."""
        return await answered(frontend, request, DetokenizeRequest, detokenize, "detokenize")


def _add_models(app: FastAPI, mesh: Mesh) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """Every model that a request may name now."""
        return ModelList(data=[_card(model) for model in mesh.models()])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One model."""
        return _card(find_model(mesh, model))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created_unix_s, max_model_len=model.max_context, parent=model.parent)


def _add_operations(app: FastAPI, mesh: Mesh, operations: Operations, registry: CollectorRegistry) -> None:
    async def health(request: Request) -> Health:
        """This process answers. The models, which need the API key, tell whether a generating request would find someone."""
        stranger = caller_of(request.scope).stranger
        return Health(models=None if stranger else [model.name for model in mesh.models()])

    async def live() -> Live:
        """This process answers."""
        return Live()

    async def ready(request: Request, response: Response) -> Readiness:
        """200 when a request would succeed; else 503, and, which needs the API key, why it would not."""
        reasons = operations.reasons()
        if reasons:
            response.status_code = 503
            response.headers["retry-after"] = "1"
        stranger = caller_of(request.scope).stranger
        return Readiness(status="unready" if reasons else "ready", reasons=None if stranger else reasons)

    async def version() -> Version:
        """Of kvmesh."""
        return Version(version=VERSION)

    async def workers() -> WorkerList:
        """Everyone in etcd, and what they said of their load last."""
        return await operations.workers()

    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    for path, handler in (("/health", health), ("/live", live), ("/version", version), ("/workers", workers)):
        _add_probe(app, path, handler)
    _add_probe(app, "/ready", ready, responses={503: {"model": Readiness, "description": "Unready"}})
    text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The metrics"}}
    _add_probe(app, "/metrics", metrics, response_class=Response, responses=text)


def _add_probe(app: FastAPI, path: str, handler: Callable[..., Any], **about: Any) -> None:
    """GET, and HEAD for probes that want no body."""
    app.add_api_route(path, handler, methods=["GET"], **about)
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **about)


def _allow_origins(app: FastAPI, origins: str | None) -> None:
    """Let pages of these origins read answers. Cookies mean nothing here, so they are not allowed along."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip().rstrip("/") for origin in origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
            max_age=3600,
        )


def _add_error_handlers(app: FastAPI) -> None:
    """Every default error page in the shape of its API."""

    async def on_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        own = None if exc.detail == HTTPStatus(exc.status_code).phrase else exc.detail
        return _error(request, from_status(exc.status_code, own), uuid4().hex, dict(exc.headers or {}))

    async def on_mesh(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, MeshError)
        request_id = uuid4().hex
        return _error(request, from_mesh(exc, request_id), request_id)

    async def on_validation(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return _error(request, from_validation(exc.errors()), uuid4().hex)

    async def on_bug(request: Request, __: Exception) -> Response:
        request_id = uuid4().hex
        return _error(request, internal(request_id), request_id)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(MeshError, on_mesh)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)


def _error(request: Request, error: ApiError, request_id: str, headers: dict[str, str] | None = None) -> Response:
    shown = caller_of(request.scope).label or request_id
    extra = {**(headers or {}), **error.headers(), "x-request-id": shown}
    status, body = in_shape_of(request.scope["path"], error, request_id)
    return Response(body, status, headers=extra, media_type="application/json")
