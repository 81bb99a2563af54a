"""From logits to token ids, each request by its own parameters inside one batch."""

from collections.abc import Sequence
from typing import Final

import torch

from engine.sampling.adjust import adjust
from engine.sampling.cuts import cut
from engine.sampling.logprobs import RawLogits
from engine.sampling.row import Row
from engine.sampling.seeds import uniform

COLDEST: Final = 1e-100  # logits over this are still numbers in float64


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """One token id a row of `logits`, contiguous float32 [B, vocab], which are overwritten; row i belongs to rows[i].

    Rows that ask for log-probabilities are left with those of their token.
    """
    if all(row.plain for row in rows):
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    raw = RawLogits(logits, rows)
    adjust(logits, rows)
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        some = logits if len(drawn) == len(rows) else logits[drawn]
        for i, token_id in zip(drawn, _draw(some, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    raw.note(token_ids)
    return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Inverse-CDF draws from softmax(logits / temperature) as far as it is not cut; float64: 10^5 terms are summed."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)  # [B, 1]

    temperature = column([max(row.params.temperature, COLDEST) for row in rows])
    probs = cut((logits.double() / temperature).softmax(dim=-1), [row.params for row in rows])
    cumulated = probs.cumsum(dim=-1)
    target = column([uniform(row.params.seed, row.position) for row in rows]) * cumulated[:, -1:]
    # right=True finds the first token whose cumulated probability exceeds the target, never one of probability 0
    chosen: list[int] = torch.searchsorted(cumulated, target, right=True).squeeze(1).tolist()
    return chosen
