"""One request as a tree: who did what, when after acceptance, for how long."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from components.telemetry.trace_store import Span

BAR_WIDTH: Final = 24
REQUEST_ID: Final = "kvmesh.request_id"


def trace_table(spans: Sequence[Span]) -> Table:
    """The spans of one trace as an indented tree; a span whose parent was not kept stands at the root."""
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    root = spans[0]
    table = Table(title=_title(spans, root, end - start), title_justify="left", box=None, pad_edge=False)
    for name in ("span", "start", "ms", "", "who"):
        table.add_column(name, justify="right" if name in ("start", "ms") else "left", no_wrap=name != "who")
    for depth, span in _in_order(spans):
        style = "red" if span.status == "ERROR" else ""
        table.add_row(
            Text("  " * depth + span.name, style=style or ("bold" if depth == 0 else "")),
            Text(f"{(span.start_ns - start) / 1e6:.1f}", style="dim"),
            f"{(span.end_ns - span.start_ns) / 1e6:.1f}",
            Text(_bar(span, start, end), style=style or "cyan"),
            Text(f"{span.service}  {_facts(span)}", style="dim"),
        )
    return table


def _in_order(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """(depth, span), each span after its parent, siblings by start."""
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
    text = Text(f"{root.name}: {len(spans)} spans, {total_ns / 1e6:.1f} ms", style="bold")
    return text.append(f"\ntrace {root.trace_id}  request {request_id}", style="dim")


def _bar(span: Span, start_ns: int, end_ns: int) -> str:
    scale = BAR_WIDTH / max(1, end_ns - start_ns)
    first = min(BAR_WIDTH - 1, int((span.start_ns - start_ns) * scale))
    last = max(first + 1, min(BAR_WIDTH, round((span.end_ns - start_ns) * scale)))
    return " " * first + "█" * (last - first)


def _facts(span: Span) -> str:
    ours = {k.removeprefix("kvmesh."): v for k, v in span.attributes.items() if k.startswith("kvmesh.")}
    return " ".join(f"{name}={value}" for name, value in ours.items() if name != "request_id")
