"""The HTTP API of `/ui`. If API keys are set, it requires one, which `services.frontend.gate` checks.

Only the page uses it, so it is not in /openapi.json and may change with the page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from components.errors import Rejected
from components.openai.errors import HTTP
from components.telemetry.perfetto import trace_events
from components.telemetry.trace_reader import Beginning, TracesUnavailable, which_of
from services.frontend.gate import caller_of
from services.frontend.request_timeline import decode_of
from services.frontend.ui.control import LocalControl, check_origin, is_from_this_machine
from services.frontend.ui.feed import Feed
from services.frontend.ui.load_history import LoadHistory
from services.frontend.ui.page import PATHS, ROOT, serve_file
from services.frontend.ui.traces import Traces, span_fields

API: Final = f"{ROOT}/api"
MAX_BODY_BYTES: Final = 4096
NO_STORE: Final = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Ui:
    feed: Feed
    history: LoadHistory
    traces: Traces
    control: LocalControl | None = None  # None: workers cannot be killed

    def routes(self) -> list[Route]:
        pages = [Route(path, _File(), methods=["GET"]) for path in sorted(PATHS)]
        return [
            *pages,
            Route("/", _start),
            Route(f"{API}/about", self._about),
            Route(f"{API}/feed", self._feed),
            Route(f"{API}/requests", self._requests),
            Route(f"{API}/traces/{{trace_id}}", self._trace),
            Route(f"{API}/traces/{{trace_id}}/perfetto", self._perfetto),
            Route(f"{API}/serving/{{trace_id}}", self._serving),
            Route(f"{API}/kill", self._kill, methods=["POST"]),
        ]

    async def _about(self, request: Request) -> Response:
        may_kill = self.control is not None and is_from_this_machine(request) and _is_operator(request)
        return JSONResponse({"may_kill": may_kill}, headers=NO_STORE)

    async def _feed(self, _: Request) -> Response:
        headers = {**NO_STORE, "x-accel-buffering": "no"}
        return StreamingResponse(self.feed.watch(), media_type="text/event-stream", headers=headers)

    async def _requests(self, request: Request) -> Response:
        which = which_of(request.query_params.get("which", "recent"))
        try:
            return JSONResponse(await self.traces.listed(which, caller_of(request.scope).sees_tenant), headers=NO_STORE)
        except TracesUnavailable as exc:
            return _refusal(503, exc.message)

    async def _trace(self, request: Request) -> Response:
        return await self._beginning(request, _page_form)

    async def _perfetto(self, request: Request) -> Response:
        """Return the trace as a file that ui.perfetto.dev opens."""
        return await self._beginning(request, _perfetto_form)

    async def _beginning(self, request: Request, form: Callable[[Beginning], Response]) -> Response:
        """Return `form` of a trace, or an error if it has no spans. `form` is called on a thread."""

        def answer(found: Beginning) -> Response:
            if not found.spans:
                return _refusal(404, "no such trace: it was not kept, or was replaced by newer ones")
            return form(found)

        try:
            return await self.traces.trace(
                request.path_params["trace_id"], caller_of(request.scope).sees_tenant, answer
            )
        except TracesUnavailable as exc:
            return _refusal(503, exc.message)

    async def _serving(self, request: Request) -> Response:
        """Return the decode instance of a request that runs in this process; empty if it does not."""
        decode = decode_of(request.path_params["trace_id"], caller_of(request.scope).sees_tenant)
        return JSONResponse({"decode": decode}, headers=NO_STORE)

    async def _kill(self, request: Request) -> Response:
        if self.control is None:
            raise Rejected("workers can only be killed if services.local runs this mesh", code="no_control")
        check_origin(request)
        if not _is_operator(request):
            raise Rejected("only a key with operator = true may kill workers", code="not_operator")
        body = await _body(request)
        try:
            order = msgspec.json.decode(body, type=dict[str, str])
            instance_id = order["instance"]
        except (msgspec.DecodeError, KeyError) as exc:
            raise Rejected('the body must be {"instance": "<instance id of a worker>"}') from exc
        return JSONResponse({"killed": await self.control.kill(instance_id)}, headers=NO_STORE)


def _page_form(found: Beginning) -> Response:
    first = found.spans[0]
    body = {
        "trace_id": first.trace_id,
        "at": first.start_ns / 1e9,
        "spans": span_fields(found.spans),
        "left_out": found.left_out,
    }
    return _json(body)


def _perfetto_form(found: Beginning) -> Response:
    file = f"kvmesh-{found.spans[0].trace_id[:12]}.json"
    return _json(trace_events(found.spans), {"content-disposition": f'attachment; filename="{file}"'})


def _json(body: Any, headers: Mapping[str, str] = {}) -> Response:
    """Return a JSON response. This is faster than JSONResponse, which would hold the GIL for longer."""
    return Response(msgspec.json.encode(body), headers={**NO_STORE, **headers}, media_type="application/json")


async def _start(request: Request) -> Response:
    """Redirect a browser to the page."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404, f"{HTTP[404][1]} {ROOT} is a page for browsers.")
    return Response(status_code=307, headers={"location": ROOT.removeprefix("/")})


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers=NO_STORE)


class _File:
    """An ASGI application. It is a class, because Starlette would pass a Request to a function."""

    async def __call__(self, *args: object) -> None:
        await serve_file(*args)  # type: ignore[arg-type]


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Rejected("the body is too long")
    return body


def _is_operator(request: Request) -> bool:
    """Return whether this client may see requests of all tenants; without API keys, every client may."""
    return caller_of(request.scope).sees_tenant is None
