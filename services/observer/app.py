"""The observer's HTTP server: receives OTLP and returns traces as JSON."""

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http import HTTPStatus
from secrets import compare_digest
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from components.errors import MeshError, Overloaded, Rejected
from components.startup import WrongSettings
from components.telemetry.otlp_sender import OBSERVER, PATH
from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import PIECES
from components.telemetry.trace_reader import API, LocalTraceReader, which_of
from components.telemetry.trace_store import TraceWriter
from services.observer.config import ObserverSettings
from services.observer.otlp import JSON, TooLarge, read_request, unzipped

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITING_BYTES: Final = 64 << 20  # bodies that are being read or written
MAX_LISTED: Final = 1000
DEFAULT_LISTED: Final = 50


class ObserverApp:
    """An ASGI application. One thread writes, so that requests do not wait for locks; another one reads."""

    def __init__(self, settings: ObserverSettings) -> None:
        """Raises: WrongSettings, if traces cannot be kept in the state directory."""
        try:
            settings.home.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise WrongSettings(
                f"setting state_dir: cannot make {settings.home}: {exc.strerror}; set a directory that this user can write to"
            ) from exc
        self._settings = settings
        self._token = None if settings.token is None else settings.token.get_secret_value()
        self._writer = TraceWriter(settings.home, settings.limits)
        self._reader = LocalTraceReader(settings.home)
        self._writing = ThreadPoolExecutor(1, "write")
        self._reading = ThreadPoolExecutor(1, "read")
        self._waiting_bytes = 0

    def close(self) -> None:
        self._writing.submit(self._writer.close)
        self._writing.shutdown()
        self._reading.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except TooLarge as exc:
            response = _text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, exc.message)
        except Rejected as exc:
            response = _text(HTTPStatus.BAD_REQUEST, exc.message)
        except MeshError as exc:
            response = _text(HTTPStatus.SERVICE_UNAVAILABLE, exc.message)
            response.headers["retry-after"] = "1"
        except Exception:
            log.exception("request failed", extra={"path": request.url.path})
            response = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "the observer failed; its log says why")
        response.headers["server"] = OBSERVER
        response.headers["accept-post"] = PIECES
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.url.path
        if path == "/health":
            return _json({"ready": True})
        if not self._authorised(request.headers.get("authorization", "")):
            refused = _text(
                HTTPStatus.UNAUTHORIZED,
                "this observer requires its token: set it as the password in MESH_OTLP_ENDPOINT",
            )
            refused.headers["www-authenticate"] = 'Basic realm="kvmesh observer"'
            return refused
        if path == PATH:
            return await self._take(request) if method == "POST" else _wrong_method("POST")
        if path == API or path.startswith(f"{API}/"):
            return await self._show(request) if method == "GET" else _wrong_method("GET")
        return _text(HTTPStatus.NOT_FOUND, f"no such path: send spans to {PATH}, read traces at {API}")

    def _authorised(self, header: str) -> bool:
        if self._token is None:
            return True
        scheme, _, given = header.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = b64decode(given, validate=True).decode(errors="replace").partition(":")[2]
            except ValueError:  # no base64, or no ASCII
                return False
        return compare_digest(given.encode(), self._token.encode())

    async def _take(self, request: Request) -> Response:
        body = bytearray()
        try:
            await self._read(request, body)
            kind = request.headers.get("content-type", "")
            rejected = await self._on(
                self._writing, lambda: self._write(bytes(body), kind, request.headers.get("content-encoding", ""))
            )
        finally:
            self._waiting_bytes -= len(body)
        answer = ExportTraceServiceResponse()
        if rejected:
            answer.partial_success.rejected_spans = rejected
            answer.partial_success.error_message = "a span needs a trace id of 16 bytes, a span id of 8 and an end"
        if kind.startswith(JSON):
            partial = {"rejectedSpans": rejected, "errorMessage": answer.partial_success.error_message}
            return _json({"partialSuccess": partial} if rejected else {})
        return Response(answer.SerializeToString(), media_type=kind)

    def _write(self, body: bytes, kind: str, encoding: str) -> int:
        """Return the number of invalid spans. Raises: Rejected, Overloaded."""
        received = read_request(unzipped(body, encoding, self._settings.max_body_bytes), kind)
        for service, spans in received.by_service.items():
            if not self._writer.write(service, spans):
                raise Overloaded("the traces cannot be written; the observer's log says why")
        return received.rejected

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read into `body`, whose bytes count towards WAITING_BYTES. Raises: TooLarge, Overloaded."""
        most = self._settings.max_body_bytes
        async for part in request.stream():
            if len(body) + len(part) > most:
                raise TooLarge(f"the body exceeds {most} bytes: send fewer spans at a time")
            body += part
            self._waiting_bytes += len(part)
            if self._waiting_bytes > WAITING_BYTES:
                raise Overloaded("the observer has too many pending requests: retry later")

    async def _show(self, request: Request) -> Response:
        trace_id = unquote(request.url.path[len(API) + 1 :])
        asked = parse_qs(request.url.query)
        limit, tenant = _limit(asked.get("limit", [""])[0]), asked.get("tenant", [None])[0]
        if trace_id:
            return await self._on(self._reading, lambda: self._trace(trace_id, limit, tenant))
        which = which_of(asked.get("which", ["recent"])[0])
        most = DEFAULT_LISTED if limit is None else min(limit, MAX_LISTED)
        traces = await self._on(self._reading, lambda: self._reader.listed(which, most, tenant))
        return _json({"traces": [asdict(trace) for trace in traces]})

    def _trace(self, trace_id: str, limit: int | None, tenant: str | None) -> Response:
        """Return all spans as received, or the first `limit`, corrected for display. Runs on the reading thread."""
        if limit is None:
            return _spans(self._reader.spans(trace_id))
        found = self._reader.beginning(trace_id, limit, tenant)
        return _spans(found.spans, f', "left_out": {found.left_out}')

    @staticmethod
    def _on(threads: ThreadPoolExecutor, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(threads, work)


def _limit(given: str) -> int | None:
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise Rejected(f"limit={given[:20]!r} is not a number of traces or spans")
    return int(given)


def _spans(spans: Sequence[Span], more: str = "") -> Response:
    """Encode spans one by one, because one call for all would hold the GIL for long."""
    body = b'{"spans": [%b]%b}' % (b",".join([msgspec.json.encode(span) for span in spans]), more.encode())
    return Response(body, media_type=JSON)


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type=JSON)


def _text(status: HTTPStatus, text: str) -> Response:
    return Response(f"{text}\n", status, media_type="text/plain")


def _wrong_method(right: str) -> Response:
    refused = _text(HTTPStatus.METHOD_NOT_ALLOWED, f"use {right}")
    refused.headers["allow"] = right
    return refused
