"""Where no number of drafts is set, tokens are guessed if no bit of an answer can change."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from msgspec import structs

from engine.build import _num_drafts
from engine.kernels.linear import pack_linears
from engine.lora.adapters import Adapters, LowRank, pack_adapters
from engine.model.load import LoadedModel
from engine.parts import make_pool
from engine.ports import EngineRequest, TokenMask
from tests.engine.embedding_model import save_embedding_model
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.sampling.test_in_engine import Cycle
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, small

REPEATING: Final = greedy(30, ignore_eos=True, logit_bias=((77, 100.0),))


def load(path: Path, family: str, dtype: str = "bfloat16") -> LoadedModel:
    loaded = load_tiny(save_model(path / family, FAMILIES[family]()), dtype=dtype)
    pack_linears(loaded.module)
    return loaded


def num_drafted(
    loaded: LoadedModel, mask: TokenMask | None = None, penalties: Mapping[str, float] = {}, **changes: Any
) -> int:
    """Drafts while one token is repeated thirty times."""
    settings = {"pipeline": "off", "dtype": loaded.layout.dtype, **changes}
    sampling = structs.replace(REPEATING, **penalties)
    seen = run(make_engine(loaded, **settings), [EngineRequest("r", prompt(20), sampling, mask=mask)])
    assert seen.tokens["r"] == [77] * 30
    return seen.steps[-1].drafted_tokens


@pytest.fixture(autouse=True)
def _kernels(kernel: str | None) -> None:
    if kernel is not None:
        pytest.skip(kernel)


def test_packed_layers_guess(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama")
    assert num_drafted(loaded) > 10
    assert num_drafted(loaded, speculative_tokens=3) > 10
    assert num_drafted(loaded, speculative_tokens=0) == 0


@pytest.mark.parametrize("changes", [{"pipeline": "on"}, {"attention": "torch"}])
def test_not_where_steps_are_planned_ahead_or_attention_sums_otherwise(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert num_drafted(load(tmp_path, "llama"), **changes) == 0


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3-moe", "bfloat16")])
def test_not_where_bits_depend_on_the_batch(tmp_path: Path, family: str, dtype: str) -> None:
    assert num_drafted(load(tmp_path, family, dtype)) == 0
    assert num_drafted(load(tmp_path, family, dtype), speculative_tokens=3) > 10


def test_not_under_a_constraint_which_drafts_would_wear_out(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama")
    assert num_drafted(loaded, Cycle([77])) == 0
    assert num_drafted(loaded, Cycle([77]), speculative_tokens=3) > 10


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_not_under_penalties_which_count_the_text_for_each_draft(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, "llama")
    assert num_drafted(loaded, penalties={name: 1.1}) == 0
    assert num_drafted(loaded, penalties={name: 1.1}, speculative_tokens=3) > 10


@pytest.mark.parametrize(("ranks", "guesses"), [(1, True), (2, True), (3, False)])
def test_not_where_more_than_two_ranks_add_up(tmp_path: Path, ranks: int, guesses: bool) -> None:
    loaded = load(tmp_path, "llama")
    config = small(pipeline="off", dtype="bfloat16", tensor_parallel=ranks)
    assert bool(_num_drafts(loaded, config, make_pool(loaded, small(dtype="bfloat16")))) == guesses


def test_one_plain_layer_is_enough_to_change_bits(tmp_path: Path) -> None:
    loaded = load_tiny(save_model(tmp_path / "llama", FAMILIES["llama"]()), dtype="bfloat16")
    pack_linears(loaded.module.get_submodule("model.layers.0"))
    assert num_drafted(loaded) == 0


@pytest.mark.parametrize(("size", "guesses"), [(64, True), (72, False)])
def test_an_adapter_of_a_size_that_kernels_do_not_multiply_changes_bits(
    tmp_path: Path, size: int, guesses: bool
) -> None:
    change = LowRank(torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(size, 8, dtype=torch.bfloat16))
    adapters = pack_adapters(Adapters(changes={"a": [None, change]}))
    engine = make_engine(replace(load(tmp_path, "llama"), adapters=adapters), pipeline="off", dtype="bfloat16")
    assert (engine._make_drafter is not None) == guesses


def test_models_that_make_embeddings_generate_nothing(tmp_path: Path) -> None:
    loaded = load_tiny(save_embedding_model(tmp_path / "embed", "lasttoken"))
    assert make_engine(loaded, speculative_tokens=5)._make_drafter is None
