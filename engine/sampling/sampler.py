"""Logits to token ids, each request with its own parameters."""

from collections.abc import Sequence
from typing import Final

import torch

from engine.device.copies import to_device, to_host
from engine.sampling.adjust import Adjustments
from engine.sampling.cuts import Cuts
from engine.sampling.logprobs import DrawnLogprobs
from engine.sampling.row import NO_TOKEN, Row
from engine.sampling.seeds import stream_starts, uniforms

COLDEST: Final = 1e-100  # temperature; logits / this are finite in float64


class Sampler:
    """Sends parameters to the device only when the batch changes."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> "Draw":
        """Enqueue a draw for each row of `logits`, contiguous float32 [B, vocab], which are overwritten."""
        vocab = logits.shape[1]
        if self._batch is None or not self._batch.is_of(rows, vocab):
            self._batch = Batch(rows, vocab, logits.device)
        return Draw(logits, self._batch)


class Batch:
    def __init__(self, rows: Sequence[Row], vocab: int, device: torch.device) -> None:
        self.rows = list(rows)
        self._vocab = vocab
        self.adjustments = Adjustments(rows, vocab, device)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        self.drawn = [self.rows[i] for i in drawn]
        self.index = None if len(drawn) == len(rows) else to_device(drawn, device, torch.int64)  # None: all are drawn
        params = [row.params for row in self.drawn]
        temperatures = [max(p.temperature, COLDEST) for p in params]
        self.temperature = to_device(temperatures, device, torch.float64).unsqueeze(1)  # [drawn, 1]
        self.cuts = Cuts(params, device)
        self.streams = stream_starts(p.seed for p in params)

    def is_of(self, rows: Sequence[Row], vocab: int) -> bool:
        return self.rows == rows and self._vocab == vocab


class Draw:
    def __init__(self, logits: torch.Tensor, batch: Batch) -> None:
        last = logits.shape[1] - 1
        self._logprobs = DrawnLogprobs(logits, batch.rows)
        finite = logits.amax(dim=-1) < torch.inf  # false for NaN; -inf excludes a token
        chosen = _choose(logits, batch)
        # int64 [B] on the device; valid, since the next step uses them before the host does
        self.token_ids = chosen.clamp(max=last)
        self._logprobs.note(self.token_ids)
        self._host_ids = to_host(torch.where(finite & (chosen <= last), chosen, NO_TOKEN))

    def read(self) -> list[int]:
        """Store log-probabilities in the rows, after an `Arrival` was waited for.

        Returns: the ids, NO_TOKEN for rows that are not finite.
        """
        self._logprobs.leave()
        token_ids: list[int] = self._host_ids.tolist()
        return token_ids


def _choose(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """int64 [B]; the vocabulary's size if there is nothing to draw from."""
    batch.adjustments.apply(logits)
    if batch.index is None:
        return _draw(logits, batch)
    token_ids = logits.argmax(dim=-1)
    if batch.drawn:
        token_ids.index_copy_(0, batch.index, _draw(logits[batch.index], batch))
    return token_ids


def _draw(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Inverse-CDF draws from the cut softmax, in float64, because 10^5 terms are summed."""
    probs = batch.cuts.cut((logits.double() / batch.temperature).softmax(dim=-1))
    cumulated = probs.cumsum(dim=-1)
    draws = uniforms(batch.streams, [len(row.tokens) for row in batch.drawn])
    target = to_device(draws, logits.device).unsqueeze(1) * cumulated[:, -1:]
    # right=True: never a token of probability 0
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)
