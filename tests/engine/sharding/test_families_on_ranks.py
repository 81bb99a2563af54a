"""Every family over ranks gives transformers' logits, or is refused by name; ranks are threads here."""

from pathlib import Path

import pytest
import torch
from transformers import GraniteMoeConfig, PretrainedConfig, Qwen2MoeConfig

from engine.errors import UnsupportedModel
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.sharding.experts import ReducedExperts
from tests.engine.model.families import FAMILIES, OF_LATENTS, SIZES, reference, reference_logits, save_model
from tests.engine.model.test_families import paged_logits
from tests.engine.sharding.ranks_as_threads import Ranks
from tests.engine.tiny_engine import load_tiny, prompt, small

REFUSED = {
    "olmo2": "q_proj is colwise_gather_output: its module needs the outputs or inputs of all ranks",
    "gemma3n": "its layers keep the largest of all activations",
    "gpt2": "transformers has no plan to cut gpt2",
}
PROMPT = prompt(90)


def on_ranks(directory: Path, size: int, **changes: object) -> list[LoadedModel]:
    config = small(tensor_parallel=size, **changes)
    return [load_model(str(directory), config, Path("unused"), silent, rank) for rank in range(size)]


def logits_of(loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """float32 [T, vocab]. Without logits, all ranks but the first return hidden states."""
    ranks = Ranks(len(loaded), monkeypatch)
    logits, *hidden = ranks.run(lambda rank: paged_logits(loaded[rank], PROMPT, 33, "auto"))
    assert all(torch.equal(hidden[0], other) for other in hidden), "with other bits they might route otherwise"
    return logits


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / family, FAMILIES[family]())
    truth = reference_logits(reference(directory), PROMPT)
    random = paged_logits(load_tiny(directory, load_format="dummy"), PROMPT, 33, "auto")
    for size in (2, 4):
        for load_format, wanted in (("auto", truth), ("dummy", random)):
            logits = logits_of(on_ranks(directory, size, load_format=load_format), monkeypatch)
            torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*REFUSED, *OF_LATENTS)])
def test_logits_with_more_heads_on_one_rank_are_those_of_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]()
    grouped = hasattr(config, "num_key_value_heads")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3} if grouped else {"num_attention_heads": 3}
    config.update({"hidden_size": 96, **heads})
    directory = save_model(tmp_path / family, config)
    truth = reference_logits(reference(directory), PROMPT)
    loaded = on_ranks(directory, 2)
    assert [one.layout.num_heads for one in loaded] == [1, 2]
    logits = logits_of(loaded, monkeypatch)
    torch.testing.assert_close(logits, truth, atol=2e-4 * float(truth.abs().max()), rtol=0)


def odd(**changes: int) -> PretrainedConfig:
    sizes = {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, **changes}
    return Qwen2MoeConfig(**SIZES, **sizes)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        *((FAMILIES[name](), why) for name, why in REFUSED.items()),
        (odd(moe_intermediate_size=30), "mlp.experts has 6 experts of size 30, and 4 divides neither"),
        (GraniteMoeConfig(**SIZES, num_local_experts=4), "transformers' plan cuts no attention of granitemoe"),
    ],
    ids=[*REFUSED, "experts", "granitemoe"],
)
def test_what_would_be_computed_wrong_is_refused_by_name(tmp_path: Path, config: PretrainedConfig, why: str) -> None:
    directory = save_model(tmp_path / config.model_type, config)
    with pytest.raises(UnsupportedModel, match=f"^tensor_parallel=4: .*{why}"):
        on_ranks(directory, 4)


@pytest.mark.parametrize(("size", "owned"), [(2, range(3, 6)), (4, None)], ids=["whole experts", "parts of each"])
def test_experts_over_ranks_compile_to_one_graph(
    tmp_path: Path, size: int, owned: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_model(tmp_path / "qwen2-moe", FAMILIES["qwen2-moe"]())
    module = on_ranks(directory, size)[1].module
    experts = next(layer for layer in module.modules() if isinstance(layer, ReducedExperts))
    assert experts._owned == owned
    monkeypatch.setattr("torch.distributed.all_reduce", lambda y: y.mul_(2))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    step = torch.randn(7, 64), torch.randint(6, (7, 2)), torch.rand(7, 2)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*step), experts(*step))
    torch.compiler.reset()
