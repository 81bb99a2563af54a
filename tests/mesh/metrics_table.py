"""The table of docs/metrics.md, from the pages of a mesh's processes."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

DOC: Final = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROLES: Final = ("frontend", "decode", "prefill", "bootstrap", "planner")
_ROW: Final = re.compile(r"^\| `(kvmesh_\w+)` \| (\w+) \| ([\w, ]+) \|", re.MULTILINE)


def shown_name(name: str, kind: str) -> str:
    """Return the name for queries: the parser removes `_total` from counters."""
    return f"{name}_total" if kind == "counter" else name


def metrics_of(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and help of each of our metrics."""
    for family in text_string_to_metric_families(page):
        if family.name.startswith("kvmesh_"):
            yield shown_name(family.name, family.type), family.type, family.documentation


def rows(pages: Mapping[str, str]) -> list[str]:
    """`pages` by role. A metric that two roles describe differently gets a row for each."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for role in ROLES:
        for metric in metrics_of(pages[role]):
            roles.setdefault(metric, []).append(role)
    return [
        f"| `{name}` | {kind} | {'all' if len(where) == len(ROLES) else ', '.join(where)} | {text} |"
        for (name, kind, text), where in sorted(roles.items())
    ]


def documented() -> set[str]:
    """Return the names in docs/metrics.md, with the series of histograms."""
    names = set()
    for name, kind, _ in _ROW.findall(DOC.read_text()):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def documented_rows() -> list[str]:
    return [line for line in DOC.read_text().splitlines() if line.startswith("| `kvmesh_")]
