"""Tables without lines, as most commands print them, and the format of ages."""

from typing import Literal

from rich.table import Table


def columns(*names: str, gap: int = 2, folds: bool = False) -> Table:
    """Return a table. Columns whose name begins with ">" are right-aligned.

    Args:
        gap: spaces between columns.
        folds: whether cells that are too long are wrapped; otherwise their end is replaced by "…".
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in names:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(
            name.removeprefix(">"),
            justify=justify,
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    return table


def age(seconds: float) -> str:
    """Return a duration as `35 s`, `12 min`, `3 h` or `4 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
