"""Draws one request as a tree of spans."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, Literal

from rich.table import Table
from rich.text import Text

from components.telemetry.clock_skew import SHIFT, shift_of
from components.telemetry.logs import printable
from components.telemetry.stored_spans import Span
from components.telemetry.trace_pieces import REQUEST_ID
from components.telemetry.trace_summary import TraceSummary, root_of
from services.inspect.columns import age

BAR_WIDTH: Final = 24
CLOCK: Final = 16  # characters: the time of another day has no seconds
SHOWN_ID: Final = 12  # hex digits of a trace id
NARROW_BAR_WIDTH: Final = 10
ROOMY: Final = 110  # columns
LEAST_PROCESS: Final = 10  # columns left for `process` beside the longest name of a span
GAP: Final = 2  # between two columns of a table
OLD_S: Final = 180.0  # an older trace is marked with its age


def trace_table(spans: Sequence[Span], width: int = ROOMY, *, wide: bool = False) -> Table:
    """Return the tree as a table. A span without a stored parent is a root. Attributes need `wide`, or `ROOMY` columns."""
    shows_facts, bar_width = wide or width >= ROOMY, BAR_WIDTH if wide or width >= ROOMY else NARROW_BAR_WIDTH
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    root = root_of(spans)
    table = Table(title=_title(spans, root, end - start), title_justify="left", box=None, pad_edge=False)
    digits = max(len("start"), len(_ms(end - start)))
    others = 2 * digits + bar_width + LEAST_PROCESS + 4 * GAP
    table.add_column("span", no_wrap=True, max_width=None if wide else width - others)
    table.add_column("start", justify="right", no_wrap=True, min_width=digits)
    table.add_column("ms", justify="right", no_wrap=True, min_width=digits)
    table.add_column("", no_wrap=True, min_width=bar_width)
    table.add_column("process")  # the only one that rich may shrink
    if not wide:
        table.caption, table.caption_justify = "--wide: all attributes", "left"
    for depth, span in _in_order(spans):
        style = "red" if span.status == "ERROR" else ""
        table.add_row(
            Text(printable("  " * depth + span.name), style=style or ("bold" if depth == 0 else "")),
            Text(_ms(span.start_ns - start), style="dim"),
            _ms(span.end_ns - span.start_ns),
            Text(_bar(span, start, end, bar_width), style=style or "cyan"),
            Text(
                printable(f"{span.service}  {_facts(span, wide=wide)}".rstrip() if shows_facts else span.service),
                style="dim",
                no_wrap=not wide,
                overflow="ellipsis",
            ),
        )
    return table


def _in_order(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yield (depth, span), each span after its parent, siblings by start time."""
    known = {s.span_id for s in spans}
    children: dict[str | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (-s.start_ns, s.end_ns)):
        children[span.parent_id if span.parent_id in known else None].append(span)
    pending = [(0, span) for span in children[None]]
    while pending:
        depth, span = pending.pop()
        yield depth, span
        pending.extend((depth + 1, child) for child in children[span.span_id])


def _title(spans: Sequence[Span], root: Span, total_ns: int) -> Text:
    request_id = next((s.attributes[REQUEST_ID] for s in spans if REQUEST_ID in s.attributes), "unknown")
    old_s = time.time() - root.start_ns / 1e9
    ago = f"; {age(old_s)} ago" if old_s > OLD_S else ""
    text = Text(
        f"{printable(root.name)}: {len(spans)} spans, {total_ns / 1e6:.1f} ms, at {clock(root.start_ns)}", style="bold"
    )
    text.append(ago, style="yellow")
    for service, ms in shift_of(spans).items():
        way = "later" if ms > 0 else "earlier"
        text.append(f"\nclocks differ: {service} is shown {abs(ms):.1f} ms {way}, to begin with its caller", "yellow")
    return text.append(f"\ntrace {root.trace_id}  request {printable(str(request_id))}", style="dim")


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"


def _bar(span: Span, start_ns: int, end_ns: int, width: int) -> str:
    scale = width / max(1, end_ns - start_ns)
    first = min(width - 1, int((span.start_ns - start_ns) * scale))
    last = max(first + 1, min(width, round((span.end_ns - start_ns) * scale)))
    return " " * first + "█" * (last - first)


def _facts(span: Span, *, wide: bool) -> str:
    ours = {k.removeprefix("kvmesh."): v for k, v in span.attributes.items() if k.startswith("kvmesh.")}
    hidden = {"request_id"} if wide else {"request_id", "route.compared", SHIFT.removeprefix("kvmesh.")}
    return " ".join(f"{name}={value}" for name, value in ours.items() if name not in hidden)


def trace_list(traces: Iterable[TraceSummary]) -> Table:
    """Return a table with a row per trace, at most 80 columns wide."""
    table = Table(box=None, pad_edge=False)
    for name in ("began", "trace", "ms", "ttft", "spans", "outcome", "request"):
        justify: Literal["left", "right"] = "right" if name in {"ms", "ttft", "spans"} else "left"
        table.add_column(name, justify=justify, no_wrap=name != "request")
    for trace in traces:
        marks = [trace.status, *(["slow"] if trace.slow else []), *(["moved"] if trace.moved else [])]
        table.add_row(
            clock(int(trace.started_unix_s * 1e9))[:CLOCK],
            trace.trace_id[:SHOWN_ID],
            f"{trace.duration_s * 1e3:.1f}",
            "" if trace.ttft_s is None else f"{trace.ttft_s * 1e3:.1f}",
            str(trace.num_spans),
            ",".join(marks).removeprefix("ok,"),
            Text(
                printable(f"{trace.name}: {trace.error}" if trace.status in {"error", "refused"} else trace.name),
                no_wrap=True,
                overflow="ellipsis",
            ),
            style="red" if trace.status == "error" else "",
        )
    return table


def clock(unix_ns: int) -> str:
    """Return the local time of day, with the date if it is not today."""
    then, now = (datetime.fromtimestamp(s).astimezone() for s in (unix_ns / 1e9, time.time()))
    return f"{then:%H:%M:%S}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M:%S}"
