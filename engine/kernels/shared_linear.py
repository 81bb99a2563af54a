"""Merges linear layers with the same input, because three small products take three times as long as one."""

from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn.functional import linear

# names in transformers
SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SharedLinear(torch.nn.Module):
    """Some rows of shared weights. When traced, each sibling computes the whole product, and `merge_products` merges these."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, first: int, last: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.rows = slice(first, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., last - first] from x [..., in]."""
        if torch.compiler.is_compiling():
            return linear(x, self.weight, self.bias)[..., self.rows]
        return linear(x, self.weight[self.rows], None if self.bias is None else self.bias[self.rows])


def share_linears(module: torch.nn.Module) -> int:
    """Replace siblings in `module`, which then share a weight tensor. Returns: the number of groups."""
    shared = 0
    for parent in list(module.modules()):
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if all(type(layer) is torch.nn.Linear for layer in layers) and _alike(layers):
                _share(parent, names, layers)
                shared += 1
    return shared


def _alike(layers: list[Any]) -> bool:
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
    """Merge equal calls of `linear`, because inductor does not. Returns: the number of dropped calls."""
    products = {linear, torch.ops.aten.linear.default}  # as traced by torch.compile and by torch.export
    if hasattr(torch.ops.kvmesh, "linear"):
        products.add(torch.ops.kvmesh.linear.default)
    found: dict[Any, torch.fx.Node] = {}
    dropped = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in products:
            continue
        first = found.setdefault((node.args, tuple(node.kwargs.items())), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            dropped += 1
    return dropped
