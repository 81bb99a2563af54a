"""A step's tables on the device, at fixed addresses for recorded graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import StepShape

SMALLEST_BLOCK: Final = 16  # queries of a prompt chunk
ALIGNMENT: Final = 4  # int32 values, as Triton assumes

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper bounds of a step, which fix its tables' addresses."""

    requests: int
    tokens: int
    context: int  # tokens of one request


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """P prompt chunks in blocks of queries: int32 on the device, valid until the next step."""

    query_starts: torch.Tensor  # [P + 1], tokens of the step
    requests: torch.Tensor  # [blocks], index of the chunk
    firsts: torch.Tensor  # [blocks], within the chunk
    block_m: int

    @property
    def count(self) -> int:
        return len(self.requests)


class PageRows:
    """Block tables as arrays, converted only when they change."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._lists: list[list[int]] = []
        self._arrays: list[Ints] = []

    def take(self, shape: StepShape) -> list[Ints]:
        """Each request's pages up to its context, read-only."""
        for i, (table, context) in enumerate(zip(shape.block_tables, shape.context_lens, strict=True)):
            pages = list(table[: -(-context // self._page_size)])
            if i == len(self._lists):
                self._lists.append([])
                self._arrays.append(np.empty(0, np.int32))
            if self._lists[i] != pages:
                self._lists[i] = pages
                self._arrays[i] = np.array(pages, dtype=np.int32)
        return self._arrays[: len(shape.block_tables)]


class StepTables:
    """One buffer, filled with one copy a step: [context_lens | table_starts | pages | prompt tables].

    A row with context 0 is padding.
    """

    def __init__(self, limits: StepLimits, page_size: int, device: torch.device) -> None:
        self.limits = limits
        self._rows = _aligned(limits.requests)
        self._page_rows = PageRows(page_size)
        pages = limits.requests * -(-limits.context // page_size)
        blocks = limits.tokens // SMALLEST_BLOCK + limits.requests
        capacity = 2 * self._rows + sum(map(_aligned, (pages, limits.requests + 1, blocks, blocks)))
        self._buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self.context_lens = self._buffer[: self._rows]
        self.table_starts = self._buffer[self._rows : 2 * self._rows]
        self.pages = self._buffer[2 * self._rows :]

    def fill(self, shape: StepShape, num_decodes: int, block_m: int) -> PromptBlocks:
        """Copy `shape` in stream order, behind the previous step's kernels."""
        tables = self._page_rows.take(shape)
        assert len(tables) <= self.limits.requests, "more requests than the tables were made for"
        starts = np.cumsum([0, *map(len, tables)])
        query_lens = np.array(shape.query_lens[num_decodes:], dtype=np.int32)
        contexts = np.array(shape.context_lens, dtype=np.int32)
        requests, firsts = _blocks(query_lens, contexts[num_decodes:], block_m)
        query_starts = num_decodes + np.cumsum([0, *query_lens])
        lengths = [2 * self._rows, int(starts[-1]), len(query_starts), len(requests), len(requests)]
        at = np.cumsum([0, *map(_aligned, lengths)])
        # torch does not reuse pinned memory during a copy from it
        host = torch.empty(int(at[-1]), dtype=torch.int32, pin_memory=self._pinned)
        array: Ints = host.numpy()
        array[: 2 * self._rows] = 0
        array[: len(contexts)] = contexts
        array[self._rows :][: len(tables)] = starts[:-1]
        if tables:
            np.concatenate(tables, out=array[at[1] :][: lengths[1]])
        for where, values in zip(at[2:], (query_starts, requests, firsts), strict=False):
            array[where:][: len(values)] = values
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        on_device = [self._buffer[where:][:length] for where, length in zip(at[2:], lengths[2:], strict=False)]
        return PromptBlocks(on_device[0], on_device[1], on_device[2], block_m)


def _blocks(query_lens: Ints, contexts: Ints, block_m: int) -> tuple[Ints, Ints]:
    """Cut chunks into blocks. Those with the most keys come first, so that short ones fill the end.

    Returns: chunk and first query of each block.
    """
    counts = -(-query_lens // block_m)
    requests = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    order = np.argsort(-((contexts - query_lens)[requests] + firsts), kind="stable")
    return requests[order], firsts[order].astype(np.int32)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def count_decodes(query_lens: Sequence[int]) -> int:
    return next((i for i, length in enumerate(query_lens) if length > 1), len(query_lens))
