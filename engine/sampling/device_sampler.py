"""Sampling on a device: the rows' state, and the kernel's launches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.device.copies import to_device, to_host
from engine.sampling import device_kernel as kernel
from engine.sampling.allowed import WORD_BITS, all_but, allowed_words
from engine.sampling.drawing import drawing_of
from engine.sampling.logprobs import DrawnLogprobs
from engine.sampling.noise import stream_starts
from engine.sampling.row import Row

BLOCK: Final = 2048  # tokens
DEPTH: Final = 4  # entries of a lane's list
WARPS: Final = 16
NO_LINE: Final = -1
FIRST_LINES: Final = 8

Numbers = npt.NDArray[Any]


class Table:
    """Lines on the device, allocated on demand."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lines = torch.zeros(1, width, dtype=dtype, device=device)
        self._free = [0]

    def take(self) -> int:
        """Return a free line's number. The line has old contents."""
        if not self._free:
            old = len(self.lines)
            grown = self.lines.new_zeros(max(FIRST_LINES, 2 * old), self.lines.shape[1])
            grown[:old].copy_(self.lines)
            self._free = list(range(old, len(grown)))
            self.lines = grown
        return self._free.pop()

    def give_back(self, line: int) -> None:
        self._free.append(line)

    def write(self, lines: Sequence[int], contents: Sequence[Numbers]) -> None:
        device = self.lines.device
        values = to_device(np.stack(contents), device)
        self.lines.index_copy_(0, to_device(lines, device, torch.int64), values)

    def scatter(self, lines: Sequence[int], entries: Sequence[tuple[Numbers, Numbers]]) -> None:
        """Write (columns, values) to each line, else zeros."""
        device, width = self.lines.device, self.lines.shape[1]
        self.lines.index_fill_(0, to_device(lines, device, torch.int64), 0)
        where = np.concatenate([columns + line * width for line, (columns, _) in zip(lines, entries, strict=True)])
        values = to_device(np.concatenate([values for _, values in entries]), device, self.lines.dtype)
        self.lines.view(-1).index_copy_(0, to_device(where, device, torch.int64), values)


class Tables:
    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.words = -(-vocab // WORD_BITS)
        self.params = Table(kernel.COLUMNS.value, torch.int64, device)
        self.counts = Table(vocab, torch.int32, device)
        self.bias = Table(vocab, torch.float32, device)
        self.ends = Table(self.words, torch.int32, device)
        self.no_masks = torch.zeros(1, self.words, dtype=torch.int32, device=device)


class DeviceSampler:
    """Implements `Sampler` with one kernel for a batch.

    Each row has a slot on the device with its parameters, its position and, for penalties, its counts of tokens. The
    kernel updates position and counts. Only new rows, and rows whose text is not what was drawn, are sent.
    """

    def __init__(self, device: torch.device, *, block: int = BLOCK) -> None:
        self._device = device
        self._block = block
        self._rows: list[Row] = []
        self._positions: list[int] = []  # at which the device draws next
        self._slots: dict[Row, int] = {}
        self._kept: dict[Row, dict[Table, int]] = {}  # lines
        self._masked: list[Row] = []
        self._batch = torch.zeros(0, 2, dtype=torch.int32, device=device)
        self._lists = torch.zeros(2, 0, dtype=torch.int32, device=device)  # [2, rows * DEPTH * block]
        self._tables: Tables | None = None  # until the first logits show the vocabulary's size

    @property
    def tables(self) -> Tables:
        assert self._tables is not None
        return self._tables

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> "DeviceDraw":
        if self._tables is None:
            self._tables = Tables(logits.shape[1], self._device)
        positions = [len(row.tokens) for row in rows]
        if self._positions != positions or self._rows != rows:
            self._change(rows, positions)
        self._positions = [position + 1 for position in positions]
        logprobs = DrawnLogprobs(logits, rows)
        ids = torch.empty(2, len(rows), dtype=torch.int64, device=self._device)
        self._launch(logits, ids, self._masks())
        logprobs.enqueue(ids[0])
        return DeviceDraw(ids, logprobs)

    def _launch(self, logits: torch.Tensor, ids: torch.Tensor, masks: torch.Tensor) -> None:
        tables = self.tables
        kernel.sample_kernel[len(self._rows),](
            ids,
            logits,
            self._batch,
            tables.params.lines,
            tables.counts.lines,
            tables.bias.lines,
            tables.ends.lines,
            masks,
            self._lists[0].view(torch.float32),
            self._lists[1],
            tables.vocab,
            logits.stride(0),
            tables.words,
            BLOCK=self._block,
            DEPTH=DEPTH,
            num_warps=WARPS,
            enable_fp_fusion=False,  # for the same bits as on a CPU
        )

    def _masks(self) -> torch.Tensor:
        if not self._masked:
            return self.tables.no_masks
        return to_device(allowed_words(self._masked, self.tables.vocab).view(np.int32), self._device)

    def _change(self, rows: Sequence[Row], positions: Sequence[int]) -> None:
        """Send the state of new and changed rows, and free that of rows that left."""
        tables = self.tables
        expected = dict(zip(self._rows, self._positions, strict=True))
        wanted = dict(zip(rows, positions, strict=True))
        for row in [row for row in self._slots if row not in wanted]:
            tables.params.give_back(self._slots.pop(row))
            for table, line in self._kept.pop(row).items():
                table.give_back(line)
        if changed := [row for row, position in wanted.items() if expected.get(row) != position]:
            self._send(changed)
        self._rows = list(rows)
        self._masked = [row for row in rows if row.mask is not None]
        masks = iter(range(len(rows)))
        batch = [(self._slots[row], NO_LINE if row.mask is None else next(masks)) for row in rows]
        self._batch = to_device(batch, self._device, torch.int32)
        entries = len(rows) * DEPTH * self._block
        if self._lists.shape[1] < entries and any(drawing_of(row.params).cuts for row in rows):
            self._lists = self._lists.new_empty(2, entries)

    def _send(self, rows: Sequence[Row]) -> None:
        tables = self.tables
        new = [row for row in rows if row not in self._slots]
        for row in new:
            self._slots[row] = tables.params.take()
            self._kept[row] = {table: table.take() for table in self._tables_of(row)}
        if biased := self._with(new, tables.bias):
            tables.bias.scatter([*biased.values()], [_bias_of(row) for row in biased])
        if limited := self._with(new, tables.ends):
            words = [all_but(row.end_ids, tables.vocab).view(np.int32) for row in limited]
            tables.ends.write([*limited.values()], words)
        if penalised := self._with(rows, tables.counts):
            tables.counts.scatter([*penalised.values()], [_counts_of(row) for row in penalised])
        params = [self._params_of(row, start) for row, start in zip(rows, _starts(rows), strict=True)]
        tables.params.write([self._slots[row] for row in rows], params)

    def _tables_of(self, row: Row) -> Iterable[Table]:
        tables = self.tables
        if row.penalised:
            yield tables.counts
        if row.params.logit_bias:
            yield tables.bias
        if row.params.min_tokens and row.mask is None:
            yield tables.ends

    def _with(self, rows: Sequence[Row], table: Table) -> Mapping[Row, int]:
        """Return lines of those `rows` that have one in `table`."""
        return {row: self._kept[row][table] for row in rows if table in self._kept[row]}

    def _params_of(self, row: Row, start: int) -> Numbers:
        tables, drawing, params, lines = self.tables, drawing_of(row.params), row.params, self._kept[row]
        out = np.zeros(kernel.COLUMNS.value, dtype=np.int64)
        out[kernel.START.value] = start
        out[kernel.POSITION.value] = len(row.tokens)
        out[kernel.UNTIL.value] = row.start + params.min_tokens
        out[kernel.INVERSE.value] = _bits(drawing.inverse)
        out[kernel.REACH.value] = _bits(drawing.reach)
        out[kernel.TOP_K.value] = drawing.top_k
        out[kernel.SHARE.value] = drawing.share
        out[kernel.REPETITION.value] = _bits(params.repetition_penalty)
        out[kernel.PRESENCE.value] = _bits(params.presence_penalty)
        out[kernel.FREQUENCY.value] = _bits(params.frequency_penalty)
        out[kernel.COUNTS.value] = lines.get(tables.counts, NO_LINE)
        out[kernel.BIAS.value] = lines.get(tables.bias, NO_LINE)
        out[kernel.ENDS.value] = lines.get(tables.ends, NO_LINE)
        return out


class DeviceDraw:
    """Implements `Draw`."""

    def __init__(self, ids: torch.Tensor, logprobs: DrawnLogprobs) -> None:
        """`ids`: [2, B], valid ids, and ids with NO_TOKEN."""
        self.token_ids = ids[0]
        self._host_ids = to_host(ids[1])
        self._logprobs = logprobs

    def read(self) -> list[int]:
        self._logprobs.store()
        token_ids: list[int] = self._host_ids.tolist()
        return token_ids


def _starts(rows: Sequence[Row]) -> Sequence[int]:
    starts: list[int] = stream_starts(row.params.seed for row in rows).view(np.int64).tolist()
    return starts


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _bias_of(row: Row) -> tuple[Numbers, Numbers]:
    ids, values = zip(*row.params.logit_bias, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)


def _counts_of(row: Row) -> tuple[Numbers, Numbers]:
    """Return ids and counts: twice the times generated, plus 1 if in the prompt (for repetition)."""
    generated = np.asarray(row.tokens[row.start :], dtype=np.int64)
    prompt = np.asarray(row.tokens[: row.start] if row.params.repetition_penalty != 1 else (), dtype=np.int64)
    ids, index = np.unique(np.concatenate([prompt, generated]), return_inverse=True)
    values = np.zeros(len(ids), dtype=np.int32)
    np.add.at(values, index[len(prompt) :], 2)
    values[index[: len(prompt)]] |= 1
    return ids, values
