from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.opaque import attending
from engine.compilation.device import ROTATIONS, NoAttention, Traced, keep_rotations
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import load_tiny

# with its number of rotary embeddings; gpt-oss scales its sines, Gemma 3 has others in layers with windows
MODELS = [("llama", "float32", 1), ("qwen3", "bfloat16", 1), ("gemma3", "bfloat16", 2), ("gpt-oss", "float32", 1)]


def kept_of(node: torch.fx.Node) -> torch.fx.Node:
    while node.target is not torch.ops.kvmesh.keep.default:
        (node,) = node.users
    return node


@pytest.mark.parametrize(("family", "dtype", "embeddings"), MODELS)
def test_layers_read_sines_that_are_computed_once_and_give_the_same_logits(
    family: str, dtype: str, embeddings: int, tmp_path: Path
) -> None:
    traced: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        traced.append(graph_module)
        assert keep_rotations(graph_module.graph) == 2 * embeddings
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    torch._dynamo.reset()
    model = Traced(load_tiny(save_model(tmp_path / "model", FAMILIES[family]()), dtype=dtype).module)
    example = torch.arange(6, 14), torch.arange(8), torch.arange(8)
    with torch.inference_mode(), attending(NoAttention(), 8):
        logits = torch.compile(model, fullgraph=True, backend=keep)(*example)
        assert torch.equal(logits, model(*example))
    (graph_module,) = traced
    sines = [node for node in graph_module.graph.nodes if node.op == "call_method" and node.target in ROTATIONS]
    assert len(sines) == 2 * embeddings
    assert all(len(kept_of(node).users) > 1 for node in sines)
