import copy
from pathlib import Path

import pytest
import torch
from tiny_engine import EOS, greedy, load_tiny, make_engine, prompt, run, save_tiny, small, tiny_config
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from engine.model.errors import ModelUnavailable, UnsupportedModel
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.ports import EngineRequest

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def load(model: Path, **changes: object) -> LoadedModel:
    return load_model(str(model), small(**changes), Path("unused"), silent)


def write_config(directory: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(directory)
    return directory / "config.json"


def test_the_facts_of_a_model_are_read_from_its_configuration(tiny: LoadedModel) -> None:
    assert (tiny.layout.layers, tiny.layout.kv_heads, tiny.layout.head_dim, tiny.query_group) == (2, 2, 16, 2)
    assert (tiny.vocab_size, tiny.max_positions, tiny.eos_token_ids) == (128, 512, frozenset({EOS}))
    assert tiny.layout.dtype == "float32"


def test_the_dtype_is_bfloat16_unless_said_otherwise(tiny_dir: Path) -> None:
    loaded = load(tiny_dir, dtype="auto")
    assert loaded.layout.dtype == "bfloat16"
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    assert len(run(make_engine(loaded), [EngineRequest("r", prompt(40), greedy(5, ignore_eos=True))]).tokens["r"]) == 5


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=16)], ids=["qwen2", "qwen3"])
def test_random_weights_from_a_configuration_are_the_same_every_time(tmp_path: Path, config: PretrainedConfig) -> None:
    path = write_config(tmp_path, config)
    before = torch.random.get_rng_state()
    first, second = load(path), load(tmp_path, load_format="dummy")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.layout == second.layout
    answers = [run(make_engine(x), [EngineRequest("r", prompt(30), greedy(12))]).tokens for x in (first, second)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=16),
        MistralConfig(**SIZES, sliding_window=None),
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, initializer_range=0.3),
    ],
    ids=["qwen2", "qwen3", "mistral", "gpt2"],
)
def test_other_families_give_the_ids_of_generate(tmp_path: Path, config: PretrainedConfig) -> None:
    loaded = load(write_config(tmp_path, config))
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(loaded.module.config), attn_implementation="sdpa")
    reference.load_state_dict(loaded.module.state_dict())
    ids = torch.tensor([prompt(30)])
    made = reference.eval().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    seen = run(make_engine(loaded), [EngineRequest("r", prompt(30), greedy(12))])
    assert seen.tokens["r"] == made[0, 30:].tolist()


def test_weights_have_an_identity_that_follows_them_and_not_their_place(tmp_path: Path, tiny: LoadedModel) -> None:
    same = load(save_tiny(tmp_path / "copy" / "tiny-llama"))
    other = load(save_tiny(tmp_path / "other" / "tiny-llama", seed=1))
    assert same.layout == tiny.layout
    assert other.layout.model.startswith("tiny-llama@")
    assert other.layout.model != tiny.layout.model
    assert load(tmp_path / "copy" / "tiny-llama", load_format="dummy").layout.model not in {
        same.layout.model,
        other.layout.model,
    }


def test_several_end_tokens_are_read_from_the_generation_configuration(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_tiny(directory).eos_token_ids == {3, 4}
    (directory / "generation_config.json").unlink()
    assert load_tiny(directory).eos_token_ids == {EOS}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MistralConfig(**SIZES, sliding_window=32), "sliding window"),
        (Gemma2Config(**SIZES, head_dim=16), "caps logits"),
        (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1), "sliding_attention"),
        (T5Config(d_model=64, num_layers=2, num_heads=4, vocab_size=128), "not a decoder-only model"),
        (MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128), "under the usual names"),
        (BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128), "under the usual names"),
    ],
    ids=["mistral", "gemma2", "qwen2", "t5", "mamba", "bloom"],
)
def test_what_cannot_be_computed_right_is_refused_by_name(tmp_path: Path, config: PretrainedConfig, said: str) -> None:
    path = write_config(tmp_path / "odd-model", config)
    with pytest.raises(UnsupportedModel, match=f"odd-model is not supported: .*{said}"):
        make_engine(load(path))


def test_a_model_whose_attention_goes_elsewhere_is_refused(tmp_path: Path) -> None:
    """transformers keeps the choice of attention in the configuration: whoever shares it may change it."""
    loaded = load(write_config(tmp_path, Qwen2Config(**SIZES)))
    loaded.module.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModel, match="does not run on paged attention"):
        make_engine(loaded)


def test_a_directory_without_weights_is_answered_with_the_way_to_random_ones(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config())
    with pytest.raises(ModelUnavailable, match="load_format=dummy"):
        load(tmp_path)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        load(tmp_path)
