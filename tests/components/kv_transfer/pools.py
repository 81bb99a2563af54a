"""Two pools in numpy, and the expected result of a transfer."""

import numpy as np
from numpy.typing import NDArray

from components.kv_transfer.pieces import Pieces
from components.wire.layout import KvLayout

LAYOUT = KvLayout(model="m", dtype="bfloat16", page_size=16, layers=3, kv_heads=2, head_dim=4)
NUM_TOKENS = 300
POOL_TOKENS = 512  # of each pool: more than a prompt, so that some pages stay unchanged

Pool = NDArray[np.uint16]  # [pages, heads, layers, 2, page_size, head_dim]


def pool(layout: KvLayout, seed: int) -> Pool:
    shape = (layout.kv_heads, layout.layers, 2, layout.page_size, layout.head_dim)
    pages = POOL_TOKENS // layout.page_size
    return np.random.default_rng(seed).integers(0, 2**16, (pages, *shape), dtype=np.uint16)


def block_table(layout: KvLayout, seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    drawn = np.random.default_rng(seed).permutation(POOL_TOKENS // layout.page_size)
    return [int(page) for page in drawn[: layout.pages_for(num_tokens)]]


def copied(pieces: Pieces, source: Pool, target: Pool) -> Pool:
    """Return `target` after copying the pieces."""
    after = target.copy()
    read, written = source.view(np.uint8).reshape(-1), after.view(np.uint8).reshape(-1)
    for start, to, length in zip(pieces.source, pieces.target, pieces.length, strict=True):
        assert 0 <= start < start + length <= read.size
        written[to : to + length] = read[start : start + length]
    return after


def brute_force(tokens: range, source: Pool, ours: list[int], target: Pool, theirs: list[int]) -> Pool:
    """Return `target` after copying each token's rows."""
    after = target.copy()
    size_here, size_there = source.shape[4], target.shape[4]
    for token in tokens:
        rows = source[ours[token // size_here], :, :, :, token % size_here]
        after[theirs[token // size_there], :, :, :, token % size_there] = rows
    return after
