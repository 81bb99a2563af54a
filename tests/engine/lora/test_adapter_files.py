"""Reading PEFT's files, and refusals with the adapter's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelUnavailable, UnsupportedModel
from engine.lora.adapter_config import adapter_identity, read_adapter_config
from tests.engine.lora.lora_files import save_adapter
from tests.engine.model.families import FAMILIES, save_model
from tests.engine.tiny_engine import load_tiny, save_tiny


def written(directory: Path, **changes: Any) -> Path:
    """Write PEFT 0.17's adapter_config.json with `changes`; None removes a key."""
    config: dict[str, Any] = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "org/model",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 32,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": 16,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    }
    config.update(changes)
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return directory


def test_scale_and_rank_follow_patterns_by_the_end_of_the_name(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {r"layers\.1\..*q_proj": 4, "v_proj": 8}, "alpha_pattern": {"v_proj": 2}}
    config = read_adapter_config("a", written(tmp_path, **patterns))
    assert (config.rank_of("model.layers.0.self_attn.q_proj"), config.scale_of("model.layers.0.self_attn.q_proj")) == (
        16,
        2.0,
    )
    assert (config.rank_of("model.layers.1.self_attn.q_proj"), config.scale_of("model.layers.1.self_attn.q_proj")) == (
        4,
        8.0,
    )
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 0.25
    assert config.scale_of("model.layers.1.self_attn.other_v_proj") == 2.0
    stabilised = read_adapter_config("a", written(tmp_path, use_rslora=True, **patterns))
    assert stabilised.scale_of("q_proj") == 8.0


@pytest.mark.parametrize(
    ("target_modules", "named"),
    [
        (["q_proj", "mlp.gate"], {"model.layers.0.q_proj", "model.layers.1.mlp.gate"}),
        (r".*layers\.1\..*", {"model.layers.1.mlp.gate"}),
        ("all-linear", {"model.layers.0.q_proj", "model.layers.1.mlp.gate", "model.layers.0.gate"}),
    ],
)
def test_layers_are_named_by_their_last_parts_by_a_regular_expression_or_all_of_them(
    tmp_path: Path, target_modules: object, named: set[str]
) -> None:
    layers = {"model.layers.0.q_proj", "model.layers.1.mlp.gate", "model.layers.0.gate"}
    config = read_adapter_config("a", written(tmp_path, target_modules=target_modules))
    assert {layer for layer in layers if config.names(layer)} == named
    without = read_adapter_config("a", written(tmp_path, target_modules=target_modules, exclude_modules=["mlp.gate"]))
    assert {layer for layer in layers if without.names(layer)} == named - {"model.layers.1.mlp.gate"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "it is of type IA3"),
        ({"peft_type": "absent"}, "it is of type None"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "changes biases"),
        ({"lora_bias": True}, "changes biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "changes embeddings"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "begins from pissa_niter_4"),
        (
            {"use_qalora": True, "alora_invocation_tokens": [1, 2]},
            "it sets alora_invocation_tokens; it sets use_qalora",
        ),
        ({"layer_replication": [[0, 2]]}, "it sets layer_replication"),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^LoRA adapter 'legal' is not supported: .*{said}"):
        read_adapter_config("legal", written(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"r": 0}, {"r": "8"}, {"r": "absent"}, {"lora_alpha": None}, {"target_modules": None}, {"target_modules": "(["}],
)
def test_a_configuration_that_is_not_pefts_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((ModelUnavailable, UnsupportedModel), match="LoRA adapter 'legal'"):
        read_adapter_config("legal", written(tmp_path, **changes))


def test_a_directory_without_an_adapter_is_refused_by_name(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"LoRA adapter 'legal': .*adapter_config\.json cannot be read"):
        load_tiny(tiny_dir, lora={"legal": str(tmp_path / "nowhere")})
    directory = save_adapter(tmp_path / "a", tiny_dir, 1)
    (directory / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnavailable, match=r"LoRA adapter 'legal': .*adapter_model\.safetensors cannot be read"):
        load_tiny(tiny_dir, lora={"legal": str(directory)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1}, r"it changes model\.layers\.1\..*Was the adapter trained on another model"),
        ({"num_hidden_layers": 3}, r"no weights for model\.layers\.2\..*Was the adapter trained on another model"),
        ({"intermediate_size": 80}, r"does not fit this model: the matrices of model\.layers\.0\.mlp\.\w+ are"),
    ],
)
def test_an_adapter_of_another_model_is_refused_by_name(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, int], said: str
) -> None:
    directory = save_adapter(tmp_path / "adapter", tiny_dir, 1)
    other = save_tiny(tmp_path / "other", **changes)
    with pytest.raises(UnsupportedModel, match=f"LoRA adapter 'legal' .*{said}"):
        load_tiny(other, lora={"legal": str(directory)})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "is not a change of a linear layer"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "is not a change of a linear layer"),
        ("base_model.model.lm_head.lora_A.weight", "has only one of the two matrices of lm_head"),
    ],
)
def test_tensors_of_other_kinds_are_refused_by_name(tiny_dir: Path, tmp_path: Path, key: str, said: str) -> None:
    directory = save_adapter(tmp_path / "a", tiny_dir, 1)
    weights = directory / "adapter_model.safetensors"
    save_file({**load_file(weights), key: torch.zeros(4, 64)}, weights)
    with pytest.raises((ModelUnavailable, UnsupportedModel), match=f"LoRA adapter 'legal'.*{said}"):
        load_tiny(tiny_dir, lora={"legal": str(directory)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path, ranks: int) -> None:
    """The error was that the adapter may be of another model."""
    model = save_model(tmp_path / "moe", FAMILIES["qwen3-moe"]())
    directory = save_adapter(tmp_path / "adapter", model, 1, targets=("q_proj",))
    weights = directory / "adapter_model.safetensors"
    layer = "base_model.model.model.layers.0.mlp.experts.1.up_proj"
    halves = {f"{layer}.lora_A.weight": torch.zeros(4, 64), f"{layer}.lora_B.weight": torch.zeros(32, 4)}
    save_file({**load_file(weights), **halves}, weights)
    with pytest.raises(
        UnsupportedModel, match=r"it changes model\.layers\.0\.mlp\.experts\.1\.up_proj, and experts cannot be adapted"
    ):
        load_tiny(model, lora={"legal": str(directory)}, tensor_parallel=ranks)


def test_an_adapter_may_leave_layers_out_when_its_configuration_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    half = save_adapter(tmp_path / "half", tiny_dir, 1, layers_to_transform=[0])
    weights = half / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(weights).items() if ".layers.0." in name}, weights)
    loaded = load_tiny(tiny_dir, lora={"half": str(half)})
    assert len(loaded.adapters.layers) == 7
    assert all(".layers.0." in layer for layer in loaded.adapters.layers)


def test_an_adapter_of_the_output_layer_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    """Logits are computed only for sampled tokens, so its rows are not those of the step."""
    directory = save_adapter(tmp_path / "a", tiny_dir, 1, targets=("q_proj", "lm_head"))
    with pytest.raises(UnsupportedModel, match="LoRA adapter 'legal' is not supported: it changes lm_head"):
        load_tiny(tiny_dir, lora={"legal": str(directory)})


def test_identity_is_of_weights_and_configuration_not_of_place_or_base(tiny_dir: Path, tmp_path: Path) -> None:
    one = save_adapter(tmp_path / "one", tiny_dir, 1)
    same = save_adapter(tmp_path / "same", tiny_dir, 1, base_model_name_or_path="org/fork", peft_version="0.18")
    scaled = save_adapter(tmp_path / "scaled", tiny_dir, 1, lora_alpha=9)
    nearly = save_adapter(tmp_path / "nearly", tiny_dir, 1)
    tensors = load_file(nearly / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"][3, 5] += 1e-3
    save_file(tensors, nearly / "adapter_model.safetensors")
    assert adapter_identity(one) == adapter_identity(same)
    assert len({adapter_identity(directory) for directory in (one, scaled, nearly)}) == 3
