"""min_p, top_k and top_p, in this order."""

from collections.abc import Sequence

import torch

from components.wire.sampling import SamplingParams
from engine.device.copies import to_device


class Cuts:
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
