"""A step's tables on the device, at fixed addresses for recorded graphs, and its work lists.

Contexts are cut into spans, the pieces of work; the longest comes first. A decode has spans of a fixed size, a long chunk
longer ones. The cuts do not depend on the rest of the step, so a request's sums have the same order in any batch.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import StepShape

SPAN: Final = 512  # keys of a decode's span
SHORT_CHUNK: Final = 16  # tokens up to which a chunk gets smaller blocks
ALIGNMENT: Final = 4  # int32 values, as Triton assumes
HEADER: Final = 4  # int32 values before the tables: number of decodes' pieces, where they begin behind `pages`

Ints = npt.NDArray[np.int32]
AnyInts = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step, which determine its tables' addresses."""

    requests: int
    tokens: int
    context: int  # tokens of one request


@dataclass(frozen=True, slots=True)
class Blocks:
    """A chunk takes the first size that holds it, else the last.

    A chunk of n blocks has spans of n * `span` keys: it fills the device without many spans, whose partial results have a
    price.
    """

    tokens: Sequence[int]  # ascending sizes of blocks of queries
    span: int = SPAN
    most_partials: int = 1 << 30  # of a launch, without its last block

    def of_chunks(self, query_lens: Ints) -> Ints:
        """Return the index of each chunk's size."""
        return np.minimum(np.searchsorted(self.tokens, query_lens), len(self.tokens) - 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """B blocks of queries and I pieces of their work: int32 on the device, valid until the next step."""

    size: int  # index of the size in `Blocks`
    split: int  # blocks with several spans, which come first
    partials: int
    requests: torch.Tensor  # [B], index of the chunk
    firsts: torch.Tensor  # [B], first query within the chunk
    slots: torch.Tensor  # [B], index of the first partial result
    counts: torch.Tensor  # [B], spans
    piece_blocks: torch.Tensor  # [I]
    piece_spans: torch.Tensor  # [I]


@dataclass(frozen=True, slots=True)
class Filled:
    pieces: int  # of decodes
    query_starts: torch.Tensor  # [P + 1] of P chunks, tokens of the step
    prompts: Sequence[QueryBlocks]


class PageRows:
    """Block tables as arrays, converted only when they change."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._lists: list[list[int]] = []
        self._arrays: list[Ints] = []

    def take(self, shape: StepShape) -> list[Ints]:
        """Return each request's pages up to its context, read-only."""
        for i, (table, context) in enumerate(zip(shape.block_tables, shape.context_lens, strict=True)):
            pages = list(table[: -(-context // self._page_size)])
            if i == len(self._lists):
                self._lists.append([])
                self._arrays.append(np.empty(0, np.int32))
            if self._lists[i] != pages:
                self._lists[i] = pages
                self._arrays[i] = np.array(pages, dtype=np.int32)
        return self._arrays[: len(shape.block_tables)]


class DecodeSpans:
    """Whole spans, then each row's last one by length."""

    def __init__(self, span: int) -> None:
        self._span = span
        self._whole = np.empty(0, np.int32)  # number of whole spans of each row
        self._rows = self._spans = self._slots = self._whole

    def take(self, contexts: Ints) -> tuple[AnyInts, AnyInts, AnyInts]:
        """Return row and span of each piece of work, and the index of each row's first partial result."""
        whole = (contexts - 1) // self._span
        if not np.array_equal(whole, self._whole):  # for each row this changes only every `span` steps
            self._whole = whole
            self._rows = np.repeat(np.arange(len(whole), dtype=np.int32), whole)
            self._slots = np.cumsum(whole + 1, dtype=np.int32) - whole - 1
            self._spans = _count_up(whole)
        order = np.argsort(whole * self._span - contexts, kind="stable")
        return np.concatenate((self._rows, order)), np.concatenate((self._spans, whole[order])), self._slots


class StepTables:
    """One buffer, filled with one copy a step: [header | context_lens | table_starts | slots | pages | work lists].

    A row with context 0 is padding, and has no work.
    """

    def __init__(self, limits: StepLimits, page_size: int, device: torch.device, blocks: Blocks) -> None:
        self.limits = limits
        self.blocks = blocks
        rows = self._rows = _aligned(limits.requests)
        self._page_rows = PageRows(page_size)
        self._decode_spans = DecodeSpans(blocks.span)
        pages = limits.requests * -(-limits.context // page_size)
        spans = limits.requests * -(-limits.context // blocks.span)
        query_blocks = limits.tokens // blocks.tokens[0] + limits.requests
        work = limits.requests + 1 + 6 * query_blocks + 2 * spans
        # a further launch whenever its partial results fill one; each of its tables is padded
        launches = len(blocks.tokens) + (query_blocks + spans) // blocks.most_partials
        capacity = HEADER + 3 * rows + pages + work + ALIGNMENT * (3 + 6 * launches)
        self._buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self.header = self._buffer[:HEADER]
        self.context_lens, self.table_starts, self.slots = self._buffer[HEADER:][: 3 * rows].view(3, rows)
        self.pages = self._buffer[HEADER + 3 * rows :]

    def fill(self, shape: StepShape, num_decodes: int) -> Filled:
        """Copy `shape` in stream order, after the previous step's kernels."""
        tables = self._page_rows.take(shape)
        assert len(tables) <= self.limits.requests, "more requests than the tables were made for"
        lens = np.array([len(table) for table in tables], dtype=np.int32)
        contexts = np.array(shape.context_lens, dtype=np.int32)
        rows, spans, slots = self._decode_spans.take(contexts[:num_decodes])
        query_lens = np.array(shape.query_lens[num_decodes:], dtype=np.int32)
        query_starts = num_decodes + np.cumsum([0, *query_lens])
        launches = list(_launches(query_lens, contexts[num_decodes:], self.blocks)) if len(query_lens) else []
        head = np.zeros((3, self._rows), dtype=np.int32)
        head[0, : len(contexts)] = contexts
        head[1, : len(tables)] = np.cumsum(lens) - lens
        head[2, :num_decodes] = slots
        pages = np.concatenate(tables) if tables else lens
        header = np.array([len(rows), _aligned(len(pages)), 0, 0], dtype=np.int32)
        parts: list[AnyInts] = [header, head.ravel(), pages, np.concatenate((rows, spans)), query_starts]
        parts += [table for launch in launches for table in launch.tables]
        at = np.cumsum([0, *(_aligned(len(part)) for part in parts)]).tolist()
        # torch does not reuse pinned memory during a copy from it
        host = torch.empty(at[-1], dtype=torch.int32, pin_memory=self._pinned)
        array: Ints = host.numpy()
        for where, part in zip(at, parts, strict=False):
            array[where : where + len(part)] = part
        self._buffer[: at[-1]].copy_(host, non_blocking=True)
        there = (self._buffer[where:][: len(part)] for where, part in zip(at[4:], parts[4:], strict=False))
        starts = next(there)
        prompts = [
            QueryBlocks(launch.size, launch.split, launch.partials, *itertools.islice(there, len(launch.tables)))
            for launch in launches
        ]
        return Filled(len(rows), starts, prompts)


@dataclass(frozen=True, slots=True)
class _Launch:
    tables: tuple[AnyInts, ...]  # in `QueryBlocks`' order
    size: int
    split: int
    partials: int


def _launches(query_lens: Ints, contexts: Ints, blocks: Blocks) -> Iterator[_Launch]:
    """Divide chunks into blocks of queries, and these into launches by size and number of partial results."""
    sizes = blocks.of_chunks(query_lens)
    for size in np.unique(sizes).tolist():
        tokens = blocks.tokens[size]
        mine = np.flatnonzero(sizes == size).astype(np.int32)
        numbers = -(-query_lens[mine] // tokens)
        requests = np.repeat(mine, numbers)
        firsts = _count_up(numbers) * tokens
        lengths = query_lens[requests]
        ends = contexts[requests] - lengths + np.minimum(firsts + tokens, lengths)  # behind each block's last key
        widths = np.repeat(numbers, numbers) * blocks.span
        counts = -(-ends // widths)
        partials = np.where(counts > 1, counts, 0)
        launch_of = np.maximum(np.cumsum(partials) - 1, 0) // blocks.most_partials
        for launch in np.unique(launch_of).tolist():
            of_launch = launch_of == launch
            kept = np.concatenate((np.flatnonzero(of_launch & (counts > 1)), np.flatnonzero(of_launch & (counts == 1))))
            number, taken = counts[kept], partials[kept]
            piece_blocks = np.repeat(np.arange(len(kept)), number)
            piece_spans = _count_up(number)
            width = widths[kept][piece_blocks]
            order = np.argsort(-np.minimum(width, ends[kept][piece_blocks] - piece_spans * width), kind="stable")
            tables = (
                *(requests[kept], firsts[kept], np.cumsum(taken) - taken, number),
                *(piece_blocks[order], piece_spans[order]),
            )
            yield _Launch(tables, size, int((number > 1).sum()), int(taken.sum()))


def _count_up(counts: AnyInts) -> Ints:
    """Concatenate the ranges 0 to n - 1 for each n of `counts`."""
    ends = np.cumsum(counts, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def count_decodes(query_lens: Sequence[int]) -> int:
    return next((i for i, length in enumerate(query_lens) if length > 1), len(query_lens))
