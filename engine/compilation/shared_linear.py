"""Linear layers that read the same input, computed as one: for a few tokens three small products cost thrice the waiting."""

from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn.functional import linear

# as transformers names them in its decoders; where a model has fused them itself there is nothing to do
SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SharedLinear(torch.nn.Module):
    """Some rows of a linear layer that siblings share: those of one that was loaded apart.

    A compiler is shown the whole product by each sibling, and `merge_products` leaves it one; eagerly each computes its
    own rows.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, first: int, last: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._rows = slice(first, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., last - first]."""
        if torch.compiler.is_compiling():
            return linear(x, self.weight, self.bias)[..., self._rows]
        return linear(x, self.weight[self._rows], None if self.bias is None else self.bias[self._rows])


def share_linears(module: torch.nn.Module) -> int:
    """Replace siblings throughout `module`, whose weights move into one tensor; how many sets of them there were.

    Layers of any other class than torch's own are left as they are.
    """
    shared = 0
    for parent in list(module.modules()):
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if all(type(layer) is torch.nn.Linear for layer in layers) and _alike(layers):
                _share(parent, names, layers)
                shared += 1
    return shared


def _alike(layers: list[Any]) -> bool:
    """Whether one tensor can hold them."""
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )


def _share(parent: torch.nn.Module, names: tuple[str, ...], layers: list[Any]) -> None:
    def together(tensors: list[torch.Tensor]) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.cat([tensor.detach() for tensor in tensors]), requires_grad=False)

    weight = together([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else together([layer.bias for layer in layers])
    ends = [0]
    for layer in layers:
        ends.append(ends[-1] + layer.out_features)
    for name, (first, last) in zip(names, pairwise(ends), strict=True):
        setattr(parent, name, SharedLinear(weight, bias, first, last))


def merge_products(graph: torch.fx.Graph) -> int:
    """Let equal calls of `linear` in a traced forward be one, which inductor does not see to; how many were dropped."""
    found: dict[Any, torch.fx.Node] = {}
    dropped = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not linear:
            continue
        first = found.setdefault((node.args, tuple(node.kwargs.items())), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            dropped += 1
    return dropped
