"""The commands `inspect trace` and `inspect traces`: finished requests, from the observer or this host's file."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from components.settings import MeshSettings
from components.telemetry.clock_skew import corrected
from components.telemetry.perfetto import trace_events
from components.telemetry.stored_spans import Span
from components.telemetry.trace_reader import TraceReader, TracesUnavailable, open_trace_reader
from components.telemetry.trace_store import Which
from components.telemetry.trace_summary import TraceSummary, summary_of
from services.inspect.trace_view import trace_list, trace_table

LAST: Final = "last"
LISTS: Final[Mapping[str, Which]] = {"slow": "slow", "failed": "failed"}
ID_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of the ids that clients are given


def show_trace(
    settings: MeshSettings,
    console: Console,
    which: str,
    *,
    wide: bool,
    perfetto: Path | None,
    as_json: bool,
    count: int,
) -> None:
    """Show a trace or a list. `which`: last, slow, failed, or the beginning of an id."""
    reader = open_trace_reader(settings)
    try:
        if which in LISTS and perfetto is None:
            found = reader.listed(LISTS[which], count)
            _show_list(console, found, as_json=as_json, none=f"no {which} trace is kept in {reader.place}")
            return
        spans = _spans_of(reader, which)
    except TracesUnavailable as exc:
        sys.exit(exc.message)
    if perfetto is not None:
        try:
            perfetto.write_text(json.dumps(trace_events(spans)))
        except OSError as exc:
            sys.exit(f"{perfetto} cannot be written: {exc.strerror}")
        console.print(f"wrote {perfetto}: open it at https://ui.perfetto.dev", soft_wrap=True)
    elif as_json:
        _print_json({"trace": asdict(summary_of(spans)), "spans": [asdict(span) for span in spans]})
    else:
        console.print(trace_table(spans, console.width, wide=wide))


def show_traces(settings: MeshSettings, console: Console, count: int, *, as_json: bool) -> None:
    reader = open_trace_reader(settings)
    try:
        found = reader.listed("recent", count)
    except TracesUnavailable as exc:
        sys.exit(exc.message)
    _show_list(console, found, as_json=as_json, none="")


def _spans_of(reader: TraceReader, which: str) -> list[Span]:
    """Return the spans of a trace, or exit if there is none."""
    listed = "recent" if which == LAST else LISTS.get(which)
    if listed is not None:
        newest = reader.listed(listed, 1)
        wanted = newest[0].trace_id if newest else ""
    else:
        wanted = which
        for prefix in ID_PREFIXES:
            wanted = wanted.removeprefix(prefix)
    if spans := reader.spans(wanted) if wanted else []:
        return corrected(spans)
    what = (
        f"no kept trace begins with {which!r}" if listed is None and reader.listed("recent", 1) else "no trace is kept"
    )
    what = f"no {which} trace is kept" if which in LISTS else what
    sys.exit(f"{what} in {reader.place}: send a request first, or set the services' --state-dir")


def _show_list(console: Console, traces: Sequence[TraceSummary], *, as_json: bool, none: str) -> None:
    if as_json:
        _print_json({"traces": [asdict(trace) for trace in traces]})
    elif traces or not none:
        console.print(trace_list(traces))
    else:
        console.print(none, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))  # rich would wrap it
