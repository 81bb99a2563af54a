"""Logits to token ids and log-probabilities, each request with its own parameters."""

from collections.abc import Iterable, Sequence
from math import isnan
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.device.copies import to_device, to_host
from engine.sampling.adjust import Adjustments
from engine.sampling.bounds import MAX_LOGPROBS
from engine.sampling.row import NO_TOKEN, Row

Words = npt.NDArray[np.uint64]

SEED_MASK: Final = (1 << 64) - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd
FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND: Final = np.uint64(0x94D049BB133111EB)
UNUSED_BITS: Final = np.uint64(11)  # of 64: a float64 has 53
SLICE: Final = 64  # prompt rows at once
COLDEST: Final = 1e-100  # temperature; logits / this are finite in float64


def stream_starts(seeds: Iterable[int]) -> Words:
    """Random numbers by (seed, position): each seed has a SplitMix64 stream.

    So no state moves with a request. Integers on the host are equal on every device.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    return _mixed(np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64) + GOLDEN)


def uniforms(starts: Words, positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Draws in [0, 1)."""
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    return (_mixed(starts + counters * GOLDEN) >> UNUSED_BITS).astype(np.float64) * np.float64(2.0**-53)


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * FIRST
    words = (words ^ (words >> np.uint64(27))) * SECOND
    return words ^ (words >> np.uint64(31))


class Cuts:
    """min_p, top_k and top_p, in this order."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._min_p = _column([p.min_p for p in params], device) if any(p.min_p > 0 for p in params) else None
        sorts = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
        self._sorts = bool(sorts)
        self._index = None if len(sorts) == len(params) else to_device(sorts, device, torch.int64)  # None: all rows
        ks, ps = [params[i].top_k for i in sorts], [params[i].top_p for i in sorts]
        self._top_k = _column([k if k > 0 else torch.inf for k in ks], device) if any(k > 0 for k in ks) else None
        self._top_p = _column(ps, device) if any(p < 1 for p in ps) else None

    def cut(self, probs: torch.Tensor) -> torch.Tensor:
        """Return `probs`, float64 [B, vocab], with 0 for excluded tokens; not normalised."""
        if self._min_p is not None:
            probs = probs.masked_fill(probs < self._min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        if not self._sorts:
            return probs
        if self._index is None:
            return self._cut_sorted(probs)
        return probs.index_copy(0, self._index, self._cut_sorted(probs[self._index]))

    def _cut_sorted(self, probs: torch.Tensor) -> torch.Tensor:
        """Keep the top_k most probable, lower ids first among equals; of these the smallest set that reaches top_p.

        top_p is a share of the sum that top_k leaves.

        Source: top-k, Fan et al. 2018, arXiv:1805.04833; nucleus, Holtzman et al. 2020, arXiv:1904.09751.
        """
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        if self._top_k is not None:
            ordered.masked_fill_(torch.arange(probs.shape[1], device=probs.device) >= self._top_k, 0.0)
        if self._top_p is not None:
            cumulated = ordered.cumsum(dim=-1)
            beyond = cumulated - ordered >= self._top_p * cumulated[:, -1:]
            ordered.masked_fill_(beyond & (self._top_p < 1), 0.0)
        return torch.zeros_like(probs).scatter_(1, index, ordered)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return to_device(values, device, torch.float64).unsqueeze(1)  # [B, 1]


class PendingLogprobs:
    """Log-probabilities of the model's own logits, before any adjustment.

    `read`, and `leave` of the classes below, require that an `Arrival` was waited for.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, alternatives: Sequence[int]) -> None:
        """Enqueue; `logits` is float32 [N, vocab], `token_ids` is int64 [N]."""
        norm = logits.logsumexp(dim=-1, keepdim=True)
        self._alternatives = alternatives
        self._chosen = to_host((logits.gather(1, token_ids.unsqueeze(1)) - norm).squeeze(1))
        if any(alternatives):
            # a fixed number: the order of equal logits must not depend on the batch
            values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
            self._top_values, self._top_ids = to_host(values - norm), to_host(ids)

    def read(self) -> list[TokenLogprobs]:
        chosen: list[float] = self._chosen.tolist()
        if not any(self._alternatives):
            return [TokenLogprobs(logprob) for logprob in chosen]
        tops = zip(self._top_ids.tolist(), self._top_values.tolist(), strict=True)
        return [
            TokenLogprobs(logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
            for logprob, (top_ids, top_values), count in zip(chosen, tops, self._alternatives, strict=True)
        ]


class DrawnLogprobs:
    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Copy rows of `logits`, float32 [B, vocab], before they change."""
        wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._rows = [rows[i] for i in wanting]
        if wanting:
            self._index = to_device(wanting, logits.device)
            self._logits = logits[self._index]

    def note(self, token_ids: torch.Tensor) -> None:
        if self._rows:
            alternatives = [row.params.logprobs or 0 for row in self._rows]
            self._pending = PendingLogprobs(self._logits, token_ids[self._index], alternatives)

    def leave(self) -> None:
        if self._rows:
            for row, told in zip(self._rows, self._pending.read(), strict=True):
                row.logprobs = told


class PromptLogprobs:
    """Rows are converted in slices, because each is a whole vocabulary.

    Tokens noted before a preemption are skipped.
    """

    def __init__(self, row: Row, logits: torch.Tensor, first: int) -> None:
        """Enqueue; logits[i] is of token `first` + i."""
        told, count = row.prompt_logprobs, row.params.prompt_logprobs
        assert told is not None
        assert count is not None
        begin, end = len(told), min(first + len(logits), len(row.tokens) - 1)
        tokens = row.tokens[begin + 1 : end + 1]  # logits at token p are for token p + 1
        self._told = told
        self._pending: list[PendingLogprobs] = []
        for at in range(0, len(tokens), SLICE):
            some = tokens[at : at + SLICE]
            rows = logits[begin - first + at :][: len(some)].float()
            self._pending.append(PendingLogprobs(rows, to_device(some, logits.device), [count] * len(some)))

    def leave(self) -> bool:
        """Return False if they are not finite."""
        logprobs = [token for pending in self._pending for token in pending.read()]
        self._told += logprobs
        return not any(isnan(token.logprob) for token in logprobs)


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
