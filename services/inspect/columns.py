"""Tables without lines, which most commands print."""

from typing import Literal

from rich.table import Table


def columns(*names: str, gap: int = 2, folds: bool = False) -> Table:
    """Columns whose name begins with ">" are aligned to the right.

    Args:
        gap: spaces between columns.
        folds: break a cell that is too long into lines; else its end is replaced by "…".
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
