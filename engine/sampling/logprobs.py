"""Log-probabilities of drawn tokens and prompts."""

from collections.abc import Sequence
from math import isnan
from typing import Final

import torch

from components.wire.logprobs import TokenLogprobs
from engine.device.copies import to_device, to_host
from engine.sampling.bounds import MAX_LOGPROBS
from engine.sampling.row import Row

SLICE: Final = 64  # prompt rows at once, because each is a whole vocabulary


class PendingLogprobs:
    """Computed from logits before adjustment. Before `read`, and `store` of the classes below, wait for an `Arrival`."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, alternatives: Sequence[int]) -> None:
        """`logits`: float32 [N, vocab]. `token_ids`: int64 [N]."""
        norm = _log_sums(logits)
        self._alternatives = alternatives
        self._chosen = to_host((logits.gather(1, token_ids.unsqueeze(1)) - norm).squeeze(1))
        if any(alternatives):
            # a fixed number, because the order of equal logits must not depend on the batch
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


def _log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return log Σ e^logits of each row, [N, 1], in one order."""
    # several threads would sum a single row
    rows = logits.repeat(2, 1) if len(logits) == 1 else logits
    return rows.logsumexp(dim=-1, keepdim=True)[: len(logits)]


class DrawnLogprobs:
    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Copy the rows of `logits`, [B, vocab], that need log-probabilities, because these may change."""
        wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._rows = [rows[i] for i in wanting]
        if wanting:
            self._index = to_device(wanting, logits.device)
            self._logits = logits[self._index].float()

    def enqueue(self, token_ids: torch.Tensor) -> None:
        if self._rows:
            alternatives = [row.params.logprobs or 0 for row in self._rows]
            self._pending = PendingLogprobs(self._logits, token_ids[self._index], alternatives)

    def store(self) -> None:
        if self._rows:
            for row, logprobs in zip(self._rows, self._pending.read(), strict=True):
                row.logprobs = logprobs


class PromptLogprobs:
    """Tokens that have log-probabilities from before a preemption are skipped."""

    def __init__(self, row: Row, logits: torch.Tensor, first: int) -> None:
        """`logits` begin with those of token `first`."""
        prompt_logprobs, count = row.prompt_logprobs, row.params.prompt_logprobs
        assert prompt_logprobs is not None
        assert count is not None
        begin, end = len(prompt_logprobs), min(first + len(logits), len(row.tokens) - 1)
        tokens = row.tokens[begin + 1 : end + 1]  # logits at token p are for token p + 1
        self._prompt_logprobs = prompt_logprobs
        self._pending: list[PendingLogprobs] = []
        for at in range(0, len(tokens), SLICE):
            some = tokens[at : at + SLICE]
            rows = logits[begin - first + at :][: len(some)].float()
            self._pending.append(PendingLogprobs(rows, to_device(some, logits.device), [count] * len(some)))

    def store(self) -> bool:
        """Return False if a log-probability is NaN."""
        logprobs = [token for pending in self._pending for token in pending.read()]
        self._prompt_logprobs += logprobs
        return not any(isnan(token.logprob) for token in logprobs)
