"""The sum over ranks in an eager and in a compiled model; one rank stands for two that have the same part."""

import pytest
import torch

from engine.sharding.group import Reduced


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_outputs_are_summed_once_for_each_layer(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[torch.Size] = []

    def all_reduce(y: torch.Tensor) -> None:
        sums.append(y.shape)
        y.mul_(2)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    plain = torch.nn.Sequential(*layers).requires_grad_(requires_grad=False)
    reduced = torch.nn.Sequential(*map(Reduced, layers))
    model = torch.compile(reduced, fullgraph=True, backend="aot_eager") if compiled else reduced
    x = torch.randn(3, 8)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), 4 * plain(x))
    torch.compiler.reset()
    assert sums == [torch.Size([3, 8])] * 2
