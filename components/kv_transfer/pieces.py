"""The copies between two pools: whole pages in runs, or pieces of pages with different sizes or heads.

A page's contiguous [page_size, head_dim] parts are stripes. Heads are outermost, so a tensor-parallel rank's share is a slice
of the stripes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.errors import TransferFailed
from components.wire.layout import KvLayout

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """N copies; `source` and `target` are byte offsets from page 0, `length` is in bytes."""

    source: Offsets  # [N]
    target: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, some: slice) -> "Pieces":
        return Pieces(self.source[some], self.target[some], self.length[some])


def cut(
    ours: KvLayout, theirs: KvLayout, tokens: range, our_pages: Sequence[int], their_pages: Sequence[int]
) -> Pieces:
    """Return the copies of `tokens` from one rank's pool to another's, for compatible layouts.

    Both block tables begin at token 0; unused entries are not read.
    Returns: at most one piece for each stripe and page of the smaller size; fewer if neighbours touch on both sides, as those
    of whole pages of equal size do. No piece for ranks without a common head.
    """
    heads = shared_heads(ours, theirs)
    unit = min(ours.page_size, theirs.page_size)
    inner = np.arange(tokens.start // unit + 1, -(-tokens.stop // unit), dtype=np.int64) * unit
    edges = np.concatenate(([tokens.start], inner, [tokens.stop])).astype(np.int64)
    starts = edges[:-1]
    length = np.diff(edges) * ours.row_bytes
    stripes = len(heads) * ours.layers * 2
    return _merged(
        _places(ours, our_pages, starts, heads),
        _places(theirs, their_pages, starts, heads),
        np.repeat(length, stripes),
    )


def shared_heads(ours: KvLayout, theirs: KvLayout) -> range:
    """The heads that our rank writes into a peer's. If several of our ranks hold a head, only the first writes it."""
    copies = max(1, ours.shards // ours.kv_heads)
    if ours.shard % copies:
        return range(0)
    return range(max(ours.heads.start, theirs.heads.start), min(ours.heads.stop, theirs.heads.stop))


def _places(layout: KvLayout, pages: Sequence[int], tokens: Offsets, heads: range) -> Offsets:
    """Byte offsets from page 0, [tokens * stripes of these heads]."""
    table = np.asarray(pages, dtype=np.int64)
    rows = table[tokens // layout.page_size] * layout.page_bytes + tokens % layout.page_size * layout.row_bytes
    per_head = layout.layers * 2
    first = (heads.start - layout.heads.start) * per_head
    stripes = (first + np.arange(len(heads) * per_head, dtype=np.int64)) * (layout.page_size * layout.row_bytes)
    places: Offsets = (rows[:, None] + stripes).ravel()
    return places


def _merged(source: Offsets, target: Offsets, length: Offsets) -> Pieces:
    if not len(length):
        return Pieces(source, target, length)
    begins = np.ones(len(length), dtype=bool)
    begins[1:] = (source[1:] != source[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(begins)
    return Pieces(source[first], target[first], np.add.reduceat(length, first))


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pages: ours from `source` on, the peer's from `target` on."""

    source: int
    target: int
    count: int


def runs(source: Sequence[int], target: Sequence[int], num_ours: int, num_theirs: int) -> list[Run]:
    """The fewest runs that copy each page source[i] to target[i].

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
