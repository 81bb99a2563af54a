"""Reads finished traces from the observer over HTTP, or from this host's file.

Every method blocks, so an event loop needs a thread. All raise TracesUnavailable.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

from components.errors import BackendUnavailable, Rejected
from components.http.fetch import fetch
from components.settings import MeshSettings
from components.telemetry.clock_skew import corrected
from components.telemetry.otlp_sender import OBSERVER, login_header, trusting
from components.telemetry.stored_spans import Event, Span
from components.telemetry.trace_file import DAMAGED_NAME, FILE_NAME, is_damage
from components.telemetry.trace_store import WHICH, TraceStore, Which
from components.telemetry.trace_summary import TraceSummary, of_tenant, summary_of
from components.urls import without_password

API: Final = "/api/traces"
TIMEOUT_S: Final = 5.0


class TracesUnavailable(BackendUnavailable):
    """The store of traces cannot be read."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first spans of a trace, as `corrected` returns them."""

    spans: Sequence[Span]
    left_out: int = 0  # later spans


def beginning_of(spans: Sequence[Span], most: int, tenant: str | None) -> Beginning:
    """`tenant`: only its requests' spans; None: all."""
    found = corrected(spans if tenant is None else of_tenant(spans, tenant))
    return Beginning(found[:most], max(0, len(found) - most))


class TraceReader(Protocol):
    """With a `tenant`, only its requests are returned, each as if alone in its trace."""

    place: str  # for messages

    def listed(self, which: Which = "recent", limit: int = 50, tenant: str | None = None) -> list[TraceSummary]:
        """The latest traces first: all, the slow ones, or those that ended with an error.

        A cancelled or refused request does not count as failed; one whose frontend was lost does.
        """

    def spans(self, trace_id: str) -> list[Span]:
        """All spans by start time, if there are any.

        `trace_id`: the beginning of a trace id or request id, or a client's whole request id.
        """

    def beginning(self, trace_id: str, most: int, tenant: str | None = None) -> Beginning:
        """Return the first `most` spans, because a client may put any number of requests into one trace."""


class LocalTraceReader:
    """`TraceReader` over this host's file."""

    def __init__(self, home: Path) -> None:
        self.place = str(home)
        self._file = home / FILE_NAME
        self._store = TraceStore(home)

    def listed(self, which: Which = "recent", limit: int = 50, tenant: str | None = None) -> list[TraceSummary]:
        with self._readable():
            traces: Iterable[list[Span]] = self._store.traces(self._store.trace_ids(which, limit, tenant)).values()
            if tenant is not None:
                traces = (of_tenant(spans, tenant) for spans in traces)
            now_s = time.time() if self._store.has_roots() else None
            found = [summary_of(spans, now_s) for spans in traces if spans]  # a trace deleted meanwhile has no spans
            if which == "failed" and tenant is None:
                rootless = self._store.traces(self._store.rootless_ids(limit)).values()
                lost = [one for spans in rootless if spans and (one := summary_of(spans, now_s)).status == "error"]
                found = sorted(found + lost, key=lambda one: one.started_unix_s, reverse=True)[:limit]
            return found

    def spans(self, trace_id: str) -> list[Span]:
        with self._readable():
            return self._store.trace(trace_id)

    def beginning(self, trace_id: str, most: int, tenant: str | None = None) -> Beginning:
        return beginning_of(self.spans(trace_id), most, tenant)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            if not is_damage(exc):
                raise TracesUnavailable(f"{self._file} cannot be read: {exc}") from exc
            raise TracesUnavailable(
                f"{self._file} is damaged: {exc}. The process that writes it moves it to {DAMAGED_NAME} and begins a new "
                "file, at its next trace or after a restart"
            ) from exc


class ObserverTraceReader:
    """`TraceReader` over the API of `services.observer`."""

    def __init__(self, url: str, ca: Path | None = None) -> None:
        """`url`: may contain the observer's token as password. `ca`: as for `OtlpSender`."""
        self._ca = ca
        self.place = without_password(url).rstrip("/")
        self._headers = login_header(url)

    def listed(self, which: Which = "recent", limit: int = 50, tenant: str | None = None) -> list[TraceSummary]:
        found = [summary_from(fields) for fields in self._get(API, which=which, limit=limit, tenant=tenant)["traces"]]
        # An older observer ignores `tenant` and sends all.
        return found if tenant is None else [one for one in found if one.tenant == tenant]

    def spans(self, trace_id: str) -> list[Span]:
        return [span_from(fields) for fields in self._get(_path(trace_id))["spans"]]

    def beginning(self, trace_id: str, most: int, tenant: str | None = None) -> Beginning:
        answer = self._get(_path(trace_id), limit=most, tenant=tenant)
        spans = [span_from(fields) for fields in answer["spans"]]
        if "left_out" not in answer:  # an older observer sends all
            return beginning_of(spans, most, tenant)
        return Beginning(spans, answer["left_out"])

    def answers(self) -> bool:
        try:
            self.listed("recent", 0)
        except TracesUnavailable:
            return False
        return True

    def _get(self, path: str, **asked: str | int | None) -> dict[str, Any]:
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        path = f"{path}?{query}" if query else path
        try:
            context = trusting(self._ca) if self.place.startswith("https:") else None
            answer = fetch(self.place + path, timeout_s=TIMEOUT_S, headers=self._headers, context=context)
            if answer.status != HTTPStatus.OK:
                reason = answer.body[:1000].decode(errors="replace").strip()
                raise TracesUnavailable(f"{self.place} answered {answer.status}: {reason or 'no reason'}")
            if answer.headers.get("Server") != OBSERVER:
                raise TracesUnavailable(f"{self.place} is not a kvmesh observer: use its own page")
            return dict(json.loads(answer.body))
        except (OSError, ValueError) as exc:
            raise TracesUnavailable(f"{self.place} cannot be read: {exc}") from exc


def _path(trace_id: str) -> str:
    return f"{API}/{quote(trace_id, safe='')}"


def which_of(asked: str) -> Which:
    """Raises: Rejected."""
    for which in WHICH:
        if which == asked:
            return which
    raise Rejected(f"unknown list {asked[:20]!r}: give which={', '.join(WHICH)}", param="which")


def open_trace_reader(settings: MeshSettings) -> TraceReader:
    """A reader of the observer at `otlp_endpoint`, else of this host's file. May block for TIMEOUT_S."""
    if settings.otlp_endpoint:
        reader = ObserverTraceReader(settings.otlp_endpoint, settings.tls.ca)
        if reader.answers():
            return reader
    return LocalTraceReader(settings.home)


def summary_from(fields: dict[str, Any]) -> TraceSummary:
    """`fields`: the observer's `asdict`."""
    ids = {name: tuple(fields[name]) for name in ("decode_ids", "prefill_ids")}
    return TraceSummary(**{**fields, **ids})


def span_from(fields: dict[str, Any]) -> Span:
    return Span(**{**fields, "events": tuple(Event(**event) for event in fields["events"])})
