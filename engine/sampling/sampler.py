"""Draws token ids, with log-probabilities, from logits."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from engine.device.c_compiler import find_c_compiler
from engine.sampling.adjust import Adjustments
from engine.sampling.drawing import candidates, draw, drawing_of
from engine.sampling.logprobs import DrawnLogprobs
from engine.sampling.noise import Floats, Ids, keys, stream_starts
from engine.sampling.row import NO_TOKEN, Row


class Draw(Protocol):
    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [B] on the device, all valid, because the next step uses them before the host reads them."""

    def read(self) -> list[int]:
        """Store log-probabilities in the rows. Wait for an `Arrival` first.

        Returns: the ids; NO_TOKEN for rows with NaN or infinity, and for rows that are not greedy and exclude all tokens.
        """


class Sampler(Protocol):
    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> Draw:
        """Enqueue a draw for each row of `logits`, [B, vocab], which are not changed."""


def choose_sampler(device: torch.device) -> Sampler:
    """Return the device's sampler if Triton can compile it, else the CPU's, which draws the same tokens."""
    if device.type != "cuda" or find_spec("triton") is None or find_c_compiler() is None:
        return HostSampler()
    made: Sampler = import_module("engine.sampling.device_sampler").DeviceSampler(device)
    return made


class HostSampler:
    """Implements `Sampler` on a CPU. A batch's state is kept until the batch changes."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> "HostDraw":
        vocab = logits.shape[1]
        if self._batch is None or not self._batch.is_of(rows, vocab):
            self._batch = Batch(rows, vocab)
        return HostDraw(logits, self._batch)


class Batch:
    def __init__(self, rows: Sequence[Row], vocab: int) -> None:
        self.rows = list(rows)
        self._vocab = vocab
        self.adjustments = Adjustments(rows, vocab) if any(row.adjusts for row in rows) else None
        self.drawings = [drawing_of(row.params) for row in rows]
        self.greedy = np.array([drawing.is_greedy for drawing in self.drawings])
        self.drawn = [i for i, drawing in enumerate(self.drawings) if not drawing.is_greedy]
        self.streams = stream_starts(self.rows[i].params.seed for i in self.drawn)

    def is_of(self, rows: Sequence[Row], vocab: int) -> bool:
        return self.rows == rows and self._vocab == vocab


def _best(logits: Floats) -> tuple[Ids, Floats]:
    """Return id and value of each row's largest logit, the first of equal ones; of a NaN if there is one."""
    chosen = logits.argmax(axis=1)
    return chosen, logits[np.arange(len(logits)), chosen]


class HostDraw:
    """Implements `Draw`."""

    def __init__(self, raw: torch.Tensor, batch: Batch) -> None:
        logprobs = DrawnLogprobs(raw, batch.rows)
        logits: Floats = raw.to("cpu", torch.float32).numpy()
        chosen, largest = _best(logits)
        finite = largest < np.inf  # false for NaN; -inf excludes a token
        if batch.adjustments is not None:
            adjusted = torch.from_numpy(logits.copy())
            batch.adjustments.apply(adjusted)
            logits = adjusted.numpy()
            chosen, largest = _best(logits)
        drawable = finite & ((largest > -np.inf) | batch.greedy)
        self._host_ids: list[int] = np.where(drawable, chosen, NO_TOKEN).tolist()
        self._draw(logits, batch)
        valid = np.where(drawable, self._host_ids, chosen)
        self.token_ids = torch.from_numpy(valid).to(raw.device)
        logprobs.enqueue(self.token_ids)
        self._logprobs = logprobs

    def read(self) -> list[int]:
        self._logprobs.store()
        return self._host_ids

    def _draw(self, logits: Floats, batch: Batch) -> None:
        if not batch.drawn:
            return
        numbers = keys(batch.streams, [len(batch.rows[i].tokens) for i in batch.drawn]).tolist()
        rows = [
            (i, candidates(logits[i], best, key, batch.drawings[i]))
            for i, key in zip(batch.drawn, numbers, strict=True)
            if (best := self._host_ids[i]) != NO_TOKEN
        ]
        if rows:
            for (i, _), token_id in zip(rows, draw([row for _, row in rows]), strict=True):
                self._host_ids[i] = token_id
