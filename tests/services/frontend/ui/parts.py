"""A page over parts that a test sets: the mesh it shows, its traces, its control."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from components.aio import background
from components.http.server import serve_http
from components.telemetry.stored_spans import Event, Span
from components.telemetry.trace_pieces import TENANT
from components.telemetry.trace_reader import Beginning, TracesUnavailable, beginning_of
from components.telemetry.trace_store import Which
from components.telemetry.trace_summary import TraceSummary, of_tenant, summary_of
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.keys import KeyRing
from services.frontend.ui.api import Ui
from services.frontend.ui.feed import Feed, View
from services.frontend.ui.load_history import LoadHistory
from services.frontend.ui.traces import Traces
from tests.services.frontend.fake_mesh import FakeMesh
from tests.waiting import PATIENCE_S

TRACE_ID = "a" * 32
LONG_ID = "e" * 32
SECRET = "the moon is made of cheese"
MS = 1_000_000


def trace(trace_id: str = TRACE_ID, *, error: str = "", tenant: str = "") -> list[Span]:
    """A request over two processes; its client's words are in a stop sequence and quoted in the error."""
    attributes = {
        **({TENANT: tenant} if tenant else {}),
        "kvmesh.request_id": "r1",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stop_sequences": [SECRET],
    }
    compared = '[{"instance": "d1", "cached": 0, "queued": 0}, {"instance": "d2", "cached": 0, "queued": 90}]'
    route = {
        "kvmesh.decode.instance": "d1",
        "kvmesh.route.why": "fewest tokens queued",
        "kvmesh.route.compared": compared,
    }
    moved = Event("moved", 1030 * MS, {"from": "d1", "cause": f"lost with '{SECRET}'"})
    status = "ERROR" if error else "UNSET"
    return [
        Span(
            trace_id, "1", None, "frontend-f1", "chat tiny", 1000 * MS, 1100 * MS, status, attributes, error, (moved,)
        ),
        Span(trace_id, "2", "1", "frontend-f1", "frontend.route", 1001 * MS, 1002 * MS, "UNSET", route),
        Span(trace_id, "3", "1", "decode-d1", "decode.request", 1003 * MS, 1099 * MS, "UNSET", {}),
    ]


def long_trace(num_requests: int, tenant: str = "") -> list[Span]:
    """One that a client made of many requests, each as `trace`, a second apart."""
    return [
        replace(
            span,
            span_id=f"{number:08x}{span.span_id}",
            parent_id=f"{number:08x}{span.parent_id}" if span.parent_id else None,
            start_ns=span.start_ns + 1000 * MS * number,
            end_ns=span.end_ns + 1000 * MS * number,
        )
        for number in range(num_requests)
        for span in trace(LONG_ID, tenant=tenant)
    ]


@dataclass
class FakeReader:
    """`TraceReader` over a list."""

    traces: list[list[Span]] = field(default_factory=lambda: [trace()])
    place: str = "memory"
    fails: bool = False
    reads: int = 0

    def listed(self, which: Which = "recent", limit: int = 50, tenant: str | None = None) -> list[TraceSummary]:
        self.reads += 1
        if self.fails:
            raise TracesUnavailable("memory cannot be read: it is gone")
        traces = self.traces if tenant is None else [of_tenant(spans, tenant) for spans in self.traces]
        found = [summary_of(spans) for spans in traces if spans][:limit]
        is_listed = {
            "recent": lambda _: True,
            "slow": lambda one: one.slow,
            "failed": lambda one: one.status == "error",
        }
        return list(filter(is_listed[which], found))

    def spans(self, trace_id: str) -> list[Span]:
        return next((spans for spans in self.traces if spans[0].trace_id == trace_id), [])

    def beginning(self, trace_id: str, most: int, tenant: str | None = None) -> Beginning:
        return beginning_of(self.spans(trace_id), most, tenant)


class FakeControl:
    def __init__(self) -> None:
        self.killed: list[str] = []

    async def kill(self, instance_id: str) -> str:
        self.killed.append(instance_id)
        return "decode-0"


def make_page(
    look: Callable[[], View] = View,
    *,
    every_s: float = 0.01,
    is_over: Callable[[], bool] = lambda: False,
    reader: FakeReader | None = None,
    control: Any = None,
    shows_content: bool = False,
) -> Ui:
    traces = Traces(FrontendSettings(), shows_content=shows_content, reader=reader or FakeReader())
    return Ui(Feed(look, is_over, every_s), LoadHistory(), traces, control)


@asynccontextmanager
async def served(
    mesh: FakeMesh, ui: Ui | None, keys: KeyRing | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A frontend with that page behind a real server."""
    settings = FrontendSettings(port=0, drain_timeout_s=2, **options)
    app = create_app(mesh, mesh.text, settings, keys=keys, ui=ui)
    async with (
        background((ui or make_page()).feed.run(), "feed"),
        serve_http(app, settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        yield client
