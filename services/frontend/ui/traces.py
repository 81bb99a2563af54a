"""Traces for `/ui`: lists of requests and the spans of one, without clients' data unless that is enabled."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any, Final, TypeVar

from components.settings import MeshSettings
from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import REFUSED
from components.telemetry.trace_reader import Beginning, ObserverTraceReader, TraceReader, open_trace_reader
from components.telemetry.trace_store import Which

T = TypeVar("T")

LISTED: Final = 100
MAX_SPANS: Final = 2000  # of a trace
LIST_KEPT_S: Final = 1.0  # a list is read once a second, however many viewers there are
ASK_AGAIN_S: Final = 5.0  # for an observer that did not answer
# Attributes without client data. Others are shown only if that is enabled.
SHOWN: Final = (
    "kvmesh.",
    "gen_ai.operation.",
    "gen_ai.usage.",
    "gen_ai.response.",
    "gen_ai.request.model",
    "gen_ai.request.max_tokens",
    "gen_ai.request.temperature",
    "gen_ai.request.top_p",
    "gen_ai.request.choice.count",
    "gen_ai.request.seed",
    "error.type",
    "http.response.",
    "http.route",
    "messaging.",
)
QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"")


class Traces:
    def __init__(
        self, settings: MeshSettings, *, shows_content: bool = False, reader: TraceReader | None = None
    ) -> None:
        """`reader`: None: the one from the settings."""
        self._settings = settings
        self._shows_content = shows_content
        self._reader = reader
        self._reader_until_s = inf  # monotonic
        self._lists: dict[tuple[Which, str | None], tuple[float, dict[str, Any]]] = {}
        self._turn = asyncio.Lock()
        self._reads_trace = asyncio.Lock()  # more threads at once would keep the event loop from its turns

    async def listed(self, which: Which, tenant: str | None = None) -> Mapping[str, Any]:
        """Return summaries of requests of `tenant`, or of all, latest first. Raises: TracesUnavailable."""
        async with self._turn:
            now_s = time.monotonic()
            self._lists = {key: one for key, one in self._lists.items() if now_s - one[0] < LIST_KEPT_S}
            if (which, tenant) not in self._lists:
                reader = await self._open()
                summaries = await asyncio.to_thread(reader.listed, which, LISTED, tenant)
                traces = [{**asdict(summary), "error": self._message(summary.error)} for summary in summaries]
                found = {"place": reader.place, "tenant": tenant, "traces": traces}
                self._lists[which, tenant] = time.monotonic(), found
            return self._lists[which, tenant][1]

    async def trace(self, trace_id: str, tenant: str | None, made_into: Callable[[Beginning], T]) -> T:
        """Return `made_into` of the first spans of a trace; with `tenant`, only of its requests' spans. Called on a thread.

        There are no spans if there is no such trace. Raises: TracesUnavailable.
        """
        async with self._turn:
            reader = await self._open()

        def work() -> T:
            found = reader.beginning(trace_id, MAX_SPANS, tenant)
            return made_into(Beginning([self.shown(span) for span in found.spans], found.left_out))

        async with self._reads_trace:
            return await asyncio.to_thread(work)

    def shown(self, span: Span) -> Span:
        """Return `span` without clients' data, unless that is enabled."""
        if self._shows_content:
            return span
        events = tuple(type(event)(event.name, event.at_ns, self._facts(event.attributes)) for event in span.events)
        attributes = {name: value for name, value in span.attributes.items() if name.startswith(SHOWN)}
        if REFUSED in attributes:
            attributes[REFUSED] = self._message(str(attributes[REFUSED]))
        return Span(
            span.trace_id,
            span.span_id,
            span.parent_id,
            span.service,
            span.name,
            span.start_ns,
            span.end_ns,
            span.status,
            attributes,
            self._message(span.error),
            events,
        )

    def _facts(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._message(value) if isinstance(value, str) else value for name, value in attributes.items()}

    def _message(self, text: str) -> str:
        """Return an error message without quoted client data, unless that is enabled."""
        return text if self._shows_content else QUOTED.sub("'…'", text)

    async def _open(self) -> TraceReader:
        if self._reader is None or time.monotonic() >= self._reader_until_s:
            self._reader = await asyncio.to_thread(open_trace_reader, self._settings)
            # An observer may be unreachable for a while. When it is back, spans are no longer written to the local file.
            may_be_away = self._settings.otlp_endpoint and not isinstance(self._reader, ObserverTraceReader)
            self._reader_until_s = time.monotonic() + ASK_AGAIN_S if may_be_away else inf
        return self._reader


def span_fields(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans as JSON. Times are microseconds since the first start, because JavaScript has no 64-bit integers."""
    if not spans:
        return []
    zero_ns = min(span.start_ns for span in spans)
    return [
        {
            "id": span.span_id,
            "parent": span.parent_id,
            "service": span.service,
            "name": span.name,
            "start_us": (span.start_ns - zero_ns) / 1000,
            "end_us": (span.end_ns - zero_ns) / 1000,
            "error": span.error or ("failed" if span.status == "ERROR" else ""),
            "attributes": span.attributes,
            "events": [
                {"name": e.name, "at_us": (e.at_ns - zero_ns) / 1000, "attributes": e.attributes} for e in span.events
            ],
        }
        for span in spans
    ]
