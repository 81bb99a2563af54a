"""The metrics page and the health probes of a process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import compare_digest

from prometheus_client import CollectorRegistry, Metric, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from components.followed_files import FollowedFiles
from components.http.server import serve_http
from components.http.tls import Tls
from components.urls import Login, basic

disable_created_metrics()  # type: ignore[no-untyped-call]  # no dashboard reads them


@dataclass(frozen=True, slots=True)
class _Page:
    host: str
    port: int
    drain_timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Protection:
    tls: Tls | None = None
    login: FollowedFiles[Login] | None = None  # required for metrics, not for probes

    def admits(self, authorization: str) -> bool:
        if self.login is None:
            return True
        return compare_digest(authorization.encode(), basic(self.login.current()).encode())


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


async def metrics_response(registry: CollectorRegistry, accept: str) -> Response:
    """Only the OpenMetrics format has exemplars.

    Collectors read data that the event loop changes, so they run on it. Encoding takes four times as long, and runs in a
    thread.
    """
    encode, media_type = choose_encoder(accept)
    families = []
    for family in registry.collect():
        families.append(family)
        await asyncio.sleep(0)  # a family may have thousands of samples
    collected = CollectorRegistry()
    collected.register(_Collected(families))
    return Response(await asyncio.to_thread(encode, collected), media_type=media_type)


@asynccontextmanager
async def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    started: Callable[[], bool],
    *,
    reasons: Callable[[], Sequence[str]] = tuple,
    facts: Callable[[], Mapping[str, object]] = dict,
    targets: Callable[[str], Sequence[object]] = lambda _: (),
    protection: Protection = Protection(),
) -> AsyncIterator[str]:
    """Serve `/metrics`, `/metrics/targets`, `/live`, `/ready` and `/health`; yields the URL.

    Args:
        port: 0 for any free one.
        started: `/health` returns 200 if true, otherwise 503.
        reasons: why the process is not ready; `/ready` returns 503 while there are any.
        facts: added to `/health`.
        targets: returns the mesh's metrics pages for Prometheus' HTTP service discovery, given the request's `Host`.
        protection: TLS for all pages, and a password for those with metrics.
    Raises: WrongSettings, if a file of `protection` cannot be used.
    """
    if protection.login is not None:
        protection.login.current()

    def refused(request: Request) -> Response | None:
        if protection.admits(request.headers.get("authorization", "")):
            return None
        return Response("a user and a password are needed\n", 401, {"www-authenticate": 'Basic realm="kvmesh"'})

    async def metrics(request: Request) -> Response:
        return refused(request) or await metrics_response(registry, request.headers.get("accept", ""))

    async def all_targets(request: Request) -> Response:
        return refused(request) or JSONResponse(list(targets(request.headers.get("host", ""))))

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        why = list(reasons())
        return JSONResponse({"status": "unready" if why else "ready", "reasons": why}, 503 if why else 200)

    async def health(_: Request) -> Response:
        well = started()
        return JSONResponse({"status": "ok" if well else "starting", **facts()}, 200 if well else 503)

    # Starlette, because importing fastapi takes half a second
    pages = {"/metrics": metrics, "/metrics/targets": all_targets, "/live": live, "/ready": ready, "/health": health}
    app = Starlette(routes=[Route(path, page) for path, page in pages.items()])
    async with serve_http(app, _Page(host, port), options="--metrics-", tls=protection.tls) as url:
        yield url
