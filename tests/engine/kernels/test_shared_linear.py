"""Siblings computed as one: the same numbers, the same memory, fewer products."""

import torch
from torch import nn
from torch.nn.functional import linear

from engine.kernels.shared_linear import SharedLinear, merge_products, share_linears


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, out, bias=bias) for out in (12, 4, 4))
        self.o_proj = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x) + torch.cat([self.k_proj(x)] * 2 + [self.v_proj(x)], -1))


def products(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Its output under torch.compile, and how many products the trace had before merging and after."""
    counts: list[int] = []

    def count(traced: torch.fx.GraphModule, _inputs: object) -> object:
        def number() -> int:
            return sum(node.target is linear for node in traced.graph.nodes)

        counts.append(number())
        merge_products(traced.graph)
        traced.recompile()
        counts.append(number())
        return traced.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        return torch.compile(module, backend=count, fullgraph=True)(x), counts


def test_siblings_give_what_they_gave_and_a_compiler_computes_them_once() -> None:
    x = torch.randn(3, 8)
    for bias in (False, True):
        module = Attention(bias)
        with torch.inference_mode():
            before = module(x)
        weights = sum(parameter.numel() for parameter in module.parameters())
        assert share_linears(module) == 1
        with torch.inference_mode():
            assert torch.allclose(module(x), before, atol=1e-6)
        compiled, counts = products(module, x)
        assert torch.allclose(compiled, before, atol=1e-6)
        assert counts == [4, 2]
        assert sum(parameter.numel() for parameter in module.parameters()) == weights, "no weight is held twice"
        assert share_linears(module) == 0


def test_layers_that_are_not_plainly_linear_are_left_alone() -> None:
    """An adapter changes one sibling, so it must keep its own product."""

    class Adapted(nn.Linear):
        pass

    module = Attention(bias=False)
    module.k_proj = Adapted(8, 4, bias=False)
    assert share_linears(module) == 0
    assert not any(isinstance(part, SharedLinear) for part in module.modules())


def test_unequal_products_are_not_merged() -> None:
    _, counts = products(Attention(bias=False), torch.randn(3, 8))
    assert counts == [4, 4]
