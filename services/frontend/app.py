"""The HTTP application: routes, middleware and error handlers."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from components.discovery.pages import ScrapeTarget
from components.errors import MeshError
from components.openai.errors import from_validation, internal
from components.openai.operations import Health, Live, ModelCard, ModelList, Readiness, Version, WorkerList
from components.structured.checker import ConstraintChecker
from components.telemetry.figures import Figures
from components.telemetry.metrics_page import metrics_response
from components.text.sampling_defaults import SamplingDefaults
from components.text.tokenizer import TextModel
from components.version import VERSION
from services.frontend.admission import Admission
from services.frontend.answer_form import error_of, form_at
from services.frontend.config import FrontendSettings
from services.frontend.exchange import Frontend
from services.frontend.gate import Gate, caller_of
from services.frontend.keys import KeyRing
from services.frontend.metrics import FrontendMetrics
from services.frontend.openapi import add_post_routes
from services.frontend.operations import Operations
from services.frontend.ports import Mesh, ServedModel
from services.frontend.post_routes import FORMS, generating_routes, unary_routes
from services.frontend.prompts import find_model
from services.frontend.request_lines import RequestLines
from services.frontend.response_routes import add_response_routes
from services.frontend.server_metrics import ServerMetrics
from services.frontend.sites import Sites
from services.frontend.stored import StoredResponses
from services.frontend.ui.api import Ui

EXPOSED: Final = [  # headers that a web page's script may read
    "x-request-id",
    "request-id",
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
    figures: Figures | None = None,
    server_metrics: ServerMetrics | None = None,
    ui: Ui | None = None,
) -> FastAPI:
    """Create the HTTP application that serves requests with `mesh`.

    Args:
        registry: what `/metrics` shows besides the frontend's own metrics.
        defaults: sampling parameters for requests that set none.
        keys: each request must have one of these API keys; None: requests need no key.
        stored: the store for responses; None: responses are not stored.
        checker: checks grammars and schemas; without it, requests with such constraints are refused.
        figures: the process's figures, to which the admission queue and the token rate are added.
        server_metrics: OpenTelemetry metrics, if a collector receives them.
        ui: the page at `/ui`; None: no page.
    """
    # FastAPI serves the GET routes: it validates parameters, serialises models and describes them in /openapi.json.
    # Routes with a body are plain Starlette routes, at a fraction of the cost. Their handlers read the body, up to a limit.
    app = FastAPI(
        title="kvmesh",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # our own spans contain more and cost less
    )
    metrics = FrontendMetrics(registry or CollectorRegistry(), server_metrics)
    admission = Admission(mesh, settings, metrics)
    if figures is not None:
        figures.queues = lambda: {"admission": admission.queue()}
        figures.batch = admission.batch
        figures.loop.total = lambda: metrics.gaps.num_tokens
    lines = RequestLines(settings.request_lines_per_s, settings.slow, metrics.slow)
    frontend = Frontend(mesh, text, settings, defaults or SamplingDefaults(), metrics, admission, checker, lines)
    generating = generating_routes(frontend, stored)
    add_post_routes(app, [*generating, *unary_routes(frontend, stored)])
    add_response_routes(app, stored)
    _add_models(app, mesh)
    operations = operations or Operations(mesh)
    _add_operations(app, mesh, operations, metrics.registry)
    if ui is not None:
        ui.history.measure(metrics, admission.batch)
        app.router.routes.extend(ui.routes())
    _add_error_handlers(app)
    sites = Sites(settings.allowed_hosts, settings.cors_origins, settings.host)
    app.add_middleware(_Shortcut, endpoints={route.path: route.endpoint for route in generating})
    app.add_middleware(Gate, ring=keys, metrics=metrics, sites=sites, forms=FORMS, operations=operations, lines=lines)
    _allow_origins(app, settings.cors_origins)  # outermost: a preflight request has no key
    return app


class _Shortcut:
    """Calls the endpoints of generating routes directly, because routing takes several percent of a frontend's CPU time.

    Only exact paths match. The routes stay, for an application that is mounted under a prefix.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"] if generates else "")
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await self._app(scope, receive, _with_id(scope, send))


def _with_id(scope: Scope, send: Send) -> Send:
    """Return `send` with the request's id added to an answer that has none."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", [])
            if not any(name == b"x-request-id" for name, _ in headers):
                shown = caller_of(scope).label or uuid4().hex
                message["headers"] = [*headers, (b"x-request-id", shown.encode())]
        await send(message)

    return send_with_id


def _add_models(app: FastAPI, mesh: Mesh) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """The model and its adapters, also while no instance serves them."""
        cards = [_card(model) for model in mesh.listed_models()]
        return ModelList(data=cards, first_id=cards[0].id if cards else None, last_id=cards[-1].id if cards else None)

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """One model."""
        return _card(find_model(mesh.listed_models(), model))


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        display_name=model.name,
        created=model.created_unix_s,
        created_at=datetime.fromtimestamp(model.created_unix_s, UTC),
        max_model_len=model.max_context,
        parent=model.parent,
    )


def _add_operations(app: FastAPI, mesh: Mesh, operations: Operations, registry: CollectorRegistry) -> None:
    async def health(request: Request) -> Health:
        """This process answers. `models` needs the API key."""
        lacks_valid_key = caller_of(request.scope).lacks_valid_key
        return Health(models=None if lacks_valid_key else [model.name for model in mesh.listed_models()])

    async def live() -> Live:
        """This process answers."""
        return Live()

    async def ready(request: Request, response: Response) -> Readiness:
        """200 if a request would succeed, else 503. `reasons` needs the API key."""
        reasons = operations.reasons()
        if reasons:
            response.status_code = 503
            response.headers["retry-after"] = "1"
        lacks_valid_key = caller_of(request.scope).lacks_valid_key
        return Readiness(status="unready" if reasons else "ready", reasons=None if lacks_valid_key else reasons)

    async def version() -> Version:
        """The version of kvmesh."""
        return Version(version=VERSION)

    async def workers() -> WorkerList:
        """All registered processes, with their last heartbeat."""
        return await operations.workers()

    async def metrics(request: Request) -> Response:
        """Prometheus text format, or OpenMetrics if `Accept` prefers it."""
        return await metrics_response(registry, request.headers.get("accept", ""))

    async def targets(request: Request) -> list[ScrapeTarget]:
        """The metrics pages of all processes, for Prometheus' HTTP service discovery."""
        return operations.targets(request.headers.get("host", ""))

    _add_probe(app, "/metrics/targets", targets)
    for path, handler in (("/health", health), ("/live", live), ("/version", version), ("/workers", workers)):
        _add_probe(app, path, handler)
    _add_probe(app, "/ready", ready, responses={503: {"model": Readiness, "description": "Unready"}})
    text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The metrics"}}
    _add_probe(app, "/metrics", metrics, response_class=Response, responses=text)


def _add_probe(app: FastAPI, path: str, handler: Callable[..., Any], **about: Any) -> None:
    """Add GET, and HEAD for probes that want no body."""
    app.add_api_route(path, handler, methods=["GET"], **about)
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **about)


def _allow_origins(app: FastAPI, origins: str | None) -> None:
    """Allow web pages of these origins. Cookies are not used, so credentials are not allowed."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip().lower().rstrip("/") for origin in origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,  # a page from the internet may use a server on loopback
            expose_headers=EXPOSED,
            max_age=3600,
        )


def _add_error_handlers(app: FastAPI) -> None:
    """Answer all errors in the form of the API that was called."""

    async def on_error(request: Request, exc: Exception) -> Response:
        request_id = uuid4().hex
        if isinstance(exc, RequestValidationError):
            error = from_validation(exc.errors())
        elif isinstance(exc, HTTPException | MeshError):
            error = error_of(exc, request_id)
        else:
            error = internal(request_id)  # uvicorn logs it
        form = form_at(FORMS, request.scope["path"])(request_id)
        return form.failure(error, caller_of(request.scope).label or request_id)

    for kind in (HTTPException, MeshError, RequestValidationError, Exception):
        app.add_exception_handler(kind, on_error)
