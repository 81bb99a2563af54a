"""From logits to token ids, each request by its own parameters inside one batch."""

from collections.abc import Sequence
from typing import Final

import torch

from engine.device_copy import to_device, to_host
from engine.sampling.adjust import adjust
from engine.sampling.cuts import cut
from engine.sampling.logprobs import DrawnLogprobs
from engine.sampling.row import NO_TOKEN, Row
from engine.sampling.seeds import uniform

COLDEST: Final = 1e-100  # logits over this are still numbers in float64


class Draw:
    """One token id a row of `logits`, contiguous float32 [B, vocab], which are overwritten; row i belongs to rows[i].

    Making it enqueues the work and waits for nothing.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        last = logits.shape[1] - 1
        self._logprobs = DrawnLogprobs(logits, rows)
        finite = (
            logits.amax(dim=-1) < torch.inf
        )  # not so of a row with a NaN; -inf is the logit of a token that never comes
        chosen = _choose(logits, rows)
        # int64 [B], on the device: ids that exist, since the next step looks them up before the host has seen them
        self.token_ids = chosen.clamp(max=last)
        self._logprobs.note(self.token_ids)
        self._host_ids = to_host(torch.where(finite & (chosen <= last), chosen, NO_TOKEN))

    def read(self) -> list[int]:
        """The ids, NO_TOKEN for rows whose logits are not finite; an `Arrival` has been waited for.

        Rows that ask for log-probabilities are left with those of theirs.
        """
        self._logprobs.leave()
        token_ids: list[int] = self._host_ids.tolist()
        return token_ids


def _choose(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """int64 [B]; as many as there are tokens, an id that does not exist, where there is nothing to draw from."""
    adjust(logits, rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn and len(drawn) == len(rows):
        return _draw(logits, rows)
    token_ids = logits.argmax(dim=-1)
    if drawn:
        index = to_device(drawn, logits.device)
        token_ids.index_copy_(0, index, _draw(logits[index], [rows[i] for i in drawn]))
    return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Inverse-CDF draws from softmax(logits / temperature) as far as it is not cut; float64: 10^5 terms are summed."""

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, logits.device, torch.float64).unsqueeze(1)  # [B, 1]

    temperature = column([max(row.params.temperature, COLDEST) for row in rows])
    probs = cut((logits.double() / temperature).softmax(dim=-1), [row.params for row in rows])
    cumulated = probs.cumsum(dim=-1)
    target = column([uniform(row.params.seed, row.position) for row in rows]) * cumulated[:, -1:]
    # right=True finds the first token whose cumulated probability exceeds the target, never one of probability 0
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)
