"""Each rank has some of a layer's experts, or a part of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.errors import UnsupportedModel
from engine.sharding.group import sum_over_ranks
from engine.sharding.part import Part, packed, share

# styles of parameters in transformers: the first in `base_model_ep_plan`, the others in `base_model_tp_plan`
WHOLE_EXPERTS: Final = "grouped_gemm"
PACKED_ROWS: Final = "packed_colwise"
COLUMNS: Final = "rowwise"


@dataclass(frozen=True, slots=True)
class ExpertCut:
    owned: range | None  # the rank's experts; None: it has a part of each
    parts: Mapping[str, Part]  # by parameter of the module


def plan_experts(  # noqa: PLR0917 - the module, then how to cut it
    path: str, module: Any, whole: Mapping[str, str], parts: Mapping[str, str], rank: int, ranks: int
) -> ExpertCut:
    """Return whole experts if their number is divisible by `ranks`, else a part of each.

    Args:
        whole: by parameter, styles in transformers' plan for whole experts.
        parts: the same in its plan for parts.
    Raises: UnsupportedModel.
    """
    weights = dict(module.named_parameters(recurse=False))
    count = next(iter(weights.values())).shape[0]
    if count % ranks == 0 and whole == dict.fromkeys(weights, WHOLE_EXPERTS):
        owned = share(count, rank, ranks)
        return ExpertCut(owned, dict.fromkeys(weights, Part(0, (owned,), count)))
    if parts == {"gate_up_proj": PACKED_ROWS, "down_proj": COLUMNS} and parts.keys() == weights.keys():
        size = weights["down_proj"].shape[2]
        if size % ranks == 0:
            own = share(size, rank, ranks)
            rows = packed([(size, own), (size, own)])
            return ExpertCut(None, {"gate_up_proj": Part(1, rows, 2 * size), "down_proj": Part(2, (own,), size)})
        raise UnsupportedModel(f"{path} has {count} experts of size {size}, and {ranks} divides neither")
    raise UnsupportedModel(f"{path} has {count} experts, which {ranks} does not divide, and experts that cannot be cut")


def cut_experts(module: Any, cut: ExpertCut) -> None:
    for name, part in cut.parts.items():
        setattr(module, name, part.parameter(getattr(module, name)))
    if cut.owned is not None:
        module.num_experts = len(cut.owned)
        module._is_expert_parallel = True  # so that transformers accepts routes to other ranks' experts


class ReducedExperts(torch.nn.Module):
    """Computes the rank's part for all tokens, and sums the outputs of all ranks.

    All ranks route in the same way, because each computes the whole router from the same bits, with as many threads.
    """

    def __init__(self, part: torch.nn.Module, owned: range | None) -> None:
        super().__init__()
        self.part = part
        self._owned = owned

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if self._owned is not None:
            count = len(self._owned)
            own = top_k_index - self._owned.start
            is_elsewhere = (own < 0) | (own >= count)
            top_k_index = own.masked_fill(is_elsewhere, count)  # transformers skips this number
            top_k_weights = top_k_weights.masked_fill(is_elsewhere, 0)
        y: torch.Tensor = self.part(hidden_states, top_k_index, top_k_weights)
        return sum_over_ranks(y)


def has_experts(module: torch.nn.Module) -> bool:
    """Return whether ranks divide the experts of `module`."""
    return any(isinstance(layer, ReducedExperts) for layer in module.modules())
