"""A step's block tables and lengths on the device, where kernels and recorded graphs find them step after step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import StepShape

SMALLEST_BLOCK: Final = 16  # queries in a block of a prompt chunk
ALIGNMENT: Final = 4  # in int32: what Triton takes for granted of a pointer is then true of each table

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step exceeds, so that tables have one place for good."""

    requests: int
    tokens: int
    context: int  # tokens of one request


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The prompt chunks of a step, P of them, cut into blocks of queries; int32 on the device, until the next step."""

    query_starts: torch.Tensor  # [P + 1], tokens of the step
    requests: torch.Tensor  # [blocks], which chunk each belongs to
    firsts: torch.Tensor  # [blocks], its first query, counted in the chunk
    block_m: int  # queries in a block

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.requests)


class PageRows:
    """Block tables as arrays, converted anew only where a table has changed since the last step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._lists: list[list[int]] = []
        self._arrays: list[Ints] = []

    def take(self, shape: StepShape) -> list[Ints]:
        """The pages of each request as far as its context goes; not to be written to."""
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
    """One buffer on the device for a step's tables, filled with one copy from pinned memory.

    [context_lens | table_starts | pages | what prompts need besides]: the first three begin at the same address in
    every step, so that a graph recorded once reads what the latest step put there. A row beyond the step's requests
    has a context of 0, which kernels take for padding.
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
        """Put `shape` there, in stream order: kernels of the step before have read theirs when this lands."""
        tables = self._page_rows.take(shape)
        assert len(tables) <= self.limits.requests, "more requests than the tables were made for"
        starts = np.cumsum([0, *map(len, tables)])
        query_lens = np.array(shape.query_lens[num_decodes:], dtype=np.int32)
        contexts = np.array(shape.context_lens, dtype=np.int32)
        requests, firsts = _blocks(query_lens, contexts[num_decodes:], block_m)
        query_starts = num_decodes + np.cumsum([0, *query_lens])
        lengths = [2 * self._rows, int(starts[-1]), len(query_starts), len(requests), len(requests)]
        at = np.cumsum([0, *map(_aligned, lengths)])
        # from torch's cache of pinned memory, which does not hand a piece out again while a copy from it is under way
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
    """Chunk and first query of each block, those with the most keys to see first: the short ones fill the end."""
    counts = -(-query_lens // block_m)
    requests = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    order = np.argsort(-((contexts - query_lens)[requests] + firsts), kind="stable")
    return requests[order], firsts[order].astype(np.int32)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def count_decodes(query_lens: Sequence[int]) -> int:
    """Requests with one token, which come first."""
    return next((i for i, length in enumerate(query_lens) if length > 1), len(query_lens))
