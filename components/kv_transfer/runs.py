"""Merge pages that are neighbours on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

from components.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class Run:
    """`count` of our pages from `source` on, and of the peer's pages from `target` on."""

    source: int
    target: int
    count: int


def runs(source: Sequence[int], target: Sequence[int], num_ours: int, num_theirs: int) -> list[Run]:
    """Return the fewest runs that copy each page source[i] to page target[i].

    Raises: TransferFailed, if the lists differ in length or a page is outside its pool.
    """
    if len(source) != len(target):
        raise TransferFailed(f"{len(source)} pages cannot be written into {len(target)}")
    merged: list[Run] = []
    for ours, theirs in zip(source, target, strict=True):
        if not (0 <= ours < num_ours and 0 <= theirs < num_theirs):
            raise TransferFailed(f"page {ours} of {num_ours} here or {theirs} of {num_theirs} there is out of range")
        last = merged[-1] if merged else None
        if last is not None and (ours, theirs) == (last.source + last.count, last.target + last.count):
            merged[-1] = Run(last.source, last.target, last.count + 1)
        else:
            merged.append(Run(ours, theirs, 1))
    return merged
