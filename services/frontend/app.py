"""The HTTP routes. What a generating request does is in `services.frontend.exchange`."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from components.errors import MeshError
from components.openai.chat import ChatCompletion, ChatRequest
from components.openai.completions import Completion, CompletionRequest
from components.openai.errors import ApiError, from_mesh, from_status, internal
from components.openai.models import ModelCard, ModelList
from components.structured.checker import ConstraintChecker
from components.text.sampling_defaults import SamplingDefaults
from components.text.tokenizer import TextModel
from services.frontend.admission import Admission
from services.frontend.config import FrontendSettings
from services.frontend.endpoints import ChatDialect, CompletionDialect
from services.frontend.exchange import Exchange, Frontend
from services.frontend.metrics import FrontendMetrics
from services.frontend.ports import Mesh, ServedModel
from services.frontend.prompts import find_model
from services.frontend.schema import describe_bodies


def create_app(
    mesh: Mesh,
    text: TextModel,
    settings: FrontendSettings,
    registry: CollectorRegistry | None = None,
    defaults: SamplingDefaults | None = None,
    *,
    checker: ConstraintChecker | None = None,
) -> FastAPI:
    """The OpenAI endpoint over `mesh`.

    Args:
        mesh: who generates.
        text: tokenizer and chat template.
        settings: limits.
        registry: shown by `/metrics` beside the frontend's own figures.
        defaults: sampling parameters where a request has none.
        checker: of what answers are asked to be; without one, requests that ask are refused.
    """
    app = FastAPI(
        title="kvmesh",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # our own spans say more, and cost less
    )
    metrics = FrontendMetrics(registry or CollectorRegistry())
    admission = Admission(mesh, settings, metrics)
    _add_generation(app, Frontend(mesh, text, settings, defaults or SamplingDefaults(), metrics, admission, checker))
    _add_models(app, mesh)
    _add_operations(app, mesh, metrics.registry)
    _add_error_handlers(app)
    describe_bodies(app, {ChatDialect.route: ChatRequest, CompletionDialect.route: CompletionRequest})
    return app


class _Straight:
    """Takes generating requests past routing, dependencies and exception handlers, a seventh of a frontend's time: an exchange
    reads its own request and ends in its own errors.
    """

    def __init__(self, app: ASGIApp, exchanges: Mapping[str, Callable[[], Response]]) -> None:
        self._app = app
        self._exchanges = exchanges  # by path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is none of these."""
        make = self._exchanges.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (self._app if make is None else make())(scope, receive, send)


def _add_generation(app: FastAPI, frontend: Frontend) -> None:
    exchanges: dict[str, Callable[[], Response]] = {
        ChatDialect.route: lambda: Exchange(frontend, ChatDialect),
        CompletionDialect.route: lambda: Exchange(frontend, CompletionDialect),
    }
    app.add_middleware(_Straight, exchanges=exchanges)

    # For the description of this API, and whoever mounts the application below a path.
    @app.post(ChatDialect.route, responses={200: {"model": ChatCompletion}})
    async def chat_completions() -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        return exchanges[ChatDialect.route]()

    @app.post(CompletionDialect.route, responses={200: {"model": Completion}})
    async def completions() -> Response:
        """Continue one or several texts; with `stream`, as server-sent events."""
        return exchanges[CompletionDialect.route]()


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


def _add_operations(app: FastAPI, mesh: Mesh, registry: CollectorRegistry) -> None:
    @app.get("/health")
    async def health() -> dict[str, str | list[str]]:
        """This process answers. The models tell whether a generating request would find someone."""
        return {"status": "ok", "models": [model.name for model in mesh.models()]}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    """Every default error page in OpenAI's shape."""

    async def on_http(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        own = None if exc.detail == HTTPStatus(exc.status_code).phrase else exc.detail
        return _error(from_status(exc.status_code, own), uuid4().hex, dict(exc.headers or {}))

    async def on_mesh(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, MeshError)
        request_id = uuid4().hex
        return _error(from_mesh(exc, request_id), request_id)

    async def on_validation(_: Request, __: Exception) -> Response:
        return _error(from_status(400), uuid4().hex)

    async def on_bug(_: Request, __: Exception) -> Response:
        request_id = uuid4().hex
        return _error(internal(request_id), request_id)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(MeshError, on_mesh)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)


def _error(error: ApiError, request_id: str, headers: dict[str, str] | None = None) -> Response:
    extra = {**(headers or {}), **error.headers(), "x-request-id": request_id}
    return Response(error.body(), error.status, headers=extra, media_type="application/json")
