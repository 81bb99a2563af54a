"""What leaves improbable tokens out of a distribution: min_p, top_k, top_p, in this order."""

from collections.abc import Sequence

import torch

from engine.device_copy import to_device
from engine.ports import SamplingParams


def cut(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`probs`, float64 [B, vocab], with 0 for what row i's parameters leave out; not normalised again."""
    if any(p.min_p > 0 for p in params):
        threshold = _column([p.min_p for p in params], probs) * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < threshold, 0.0)
    sorts = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if len(sorts) == len(params):
        return _cut_sorted(probs, params)
    if sorts:
        index = to_device(sorts, probs.device)
        probs = probs.index_copy(0, index, _cut_sorted(probs[index], [params[i] for i in sorts]))
    return probs


def _cut_sorted(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The top_k most probable, of equal ones those with lower ids; of these the smallest set that reaches top_p.

    The set reaches top_p of what is left, not of 1; top_p = 1 keeps all. Sources: top-k, Fan et al. 2018,
    arXiv:1805.04833; nucleus, Holtzman et al. 2020, arXiv:1904.09751.
    """
    vocab = probs.shape[1]
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    if any(p.top_k > 0 for p in params):
        kept = _column([float(p.top_k if p.top_k > 0 else vocab) for p in params], probs)
        ordered.masked_fill_(torch.arange(vocab, device=probs.device) >= kept, 0.0)
    if any(p.top_p < 1 for p in params):
        top_p = _column([p.top_p for p in params], probs)
        cumulated = ordered.cumsum(dim=-1)
        ordered.masked_fill_((cumulated - ordered >= top_p * cumulated[:, -1:]) & (top_p < 1), 0.0)
    return torch.zeros_like(probs).scatter_(1, index, ordered)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like.device, like.dtype).unsqueeze(1)  # [B, 1]
