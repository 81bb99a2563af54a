"""The copies between two pools with different page sizes.

A page is [kv_heads, layers, 2, page_size, head_dim]; its contiguous [page_size, head_dim] parts are stripes. Heads are
outermost, so a tensor-parallel rank's share is a slice of the stripes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.wire.layout import KvLayout

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """N copies of `length` bytes; `source` and `target` are offsets from page 0."""

    source: Offsets  # [N]
    target: Offsets
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)


def cut(
    ours: KvLayout, theirs: KvLayout, tokens: range, our_pages: Sequence[int], their_pages: Sequence[int]
) -> Pieces:
    """The copies of `tokens` between pools of compatible layouts.

    Both block tables begin at token 0; unused entries are not read.
    Returns: at most one piece for each stripe and page of the smaller size; fewer if neighbours touch on both
    sides.
    """
    unit = min(ours.page_size, theirs.page_size)
    inner = np.arange(tokens.start // unit + 1, -(-tokens.stop // unit), dtype=np.int64) * unit
    edges = np.concatenate(([tokens.start], inner, [tokens.stop])).astype(np.int64)
    starts = edges[:-1]
    length = np.diff(edges) * ours.row_bytes
    return _merged(
        _places(ours, our_pages, starts),
        _places(theirs, their_pages, starts),
        np.repeat(length, ours.num_stripes),
    )


def _places(layout: KvLayout, pages: Sequence[int], tokens: Offsets) -> Offsets:
    """Byte offsets from page 0, [tokens * stripes]."""
    table = np.asarray(pages, dtype=np.int64)
    rows = table[tokens // layout.page_size] * layout.page_bytes + tokens % layout.page_size * layout.row_bytes
    stripes = np.arange(layout.num_stripes, dtype=np.int64) * (layout.page_size * layout.row_bytes)
    places: Offsets = (rows[:, None] + stripes).ravel()
    return places


def _merged(source: Offsets, target: Offsets, length: Offsets) -> Pieces:
    begins = np.ones(len(length), dtype=bool)
    begins[1:] = (source[1:] != source[:-1] + length[:-1]) | (target[1:] != target[:-1] + length[:-1])
    first = np.flatnonzero(begins)
    return Pieces(source[first], target[first], np.add.reduceat(length, first))
