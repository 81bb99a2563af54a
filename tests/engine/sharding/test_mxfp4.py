"""gpt-oss's experts in MXFP4 give the weights that transformers reads, whole and on ranks."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from engine.errors import ModelUnavailable, UnsupportedModel
from engine.model.load import LoadedModel
from engine.sharding.mxfp4 import decode
from tests.engine.model.families import FAMILIES, SIZES, save_model
from tests.engine.model.test_families import paged_logits
from tests.engine.sharding.test_families_on_ranks import logits_of, on_ranks
from tests.engine.tiny_engine import load_tiny, prompt


def save_packed(directory: Path) -> Path:
    """Save a checkpoint like gpt-oss's: random blocks and scales instead of the experts' matrices."""
    save_model(directory, FAMILIES["gpt-oss"]())
    chance = torch.Generator().manual_seed(7)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(
            256, (experts, columns, rows // 32, 16), dtype=torch.uint8, generator=chance
        )
        weights[f"{name}_scales"] = torch.randint(
            120, 125, (experts, columns, rows // 32), dtype=torch.uint8, generator=chance
        )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_packed(tmp_path_factory.mktemp("mxfp4") / "gpt-oss")


def test_each_number_is_its_sign_exponent_and_fraction_times_the_scale_of_its_group() -> None:
    """E2M1 by definition: exponents with a bias of one, subnormals of a half."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    scales = torch.tensor([[[1, 20], [127, 128], [129, 254], [100, 60]] * 2], dtype=torch.uint8)
    decoded = decode(blocks, scales)
    assert decoded.shape == (1, 64, 8)

    def element(bits: int) -> float:
        exponent, fraction = bits >> 1 & 3, bits & 1
        size = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        return -size if bits & 8 else size

    for column in range(8):
        for group in range(2):
            power = 2.0 ** (int(scales[0, column, group]) - 127)
            for i in range(32):
                byte = int(blocks[0, column, group, i // 2])
                (wanted,) = struct.unpack("f", struct.pack("f", element(byte >> 4 if i % 2 else byte & 15) * power))
                assert float(decoded[0, group * 32 + i, column]) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_logits_are_those_of_transformers(packed: Path, dtype: str) -> None:
    loaded = load_tiny(packed, dtype=dtype)
    truth = AutoModelForCausalLM.from_pretrained(
        packed, dtype=getattr(torch, dtype), quantization_config=Mxfp4Config(dequantize=True)
    )
    wanted = truth.state_dict()
    for name, weight in loaded.module.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    assert not hasattr(loaded.module.config, "quantization_config")
    ids = prompt(40)
    if dtype == "float32":
        with torch.inference_mode():
            logits = truth(torch.tensor([ids])).logits[0].float()
        torch.testing.assert_close(
            paged_logits(loaded, ids, 33, "auto"), logits, atol=1e-3 * float(logits.abs().max()), rtol=0
        )


def test_ranks_read_their_own_experts(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_tiny(packed, dtype="float32")
    wanted = paged_logits(whole, prompt(90), 33, "auto")
    ranks = on_ranks(packed, 2, dtype="float32")

    def down_proj(loaded: LoadedModel) -> torch.Tensor:
        weights = loaded.module.state_dict().items()
        return next(weight for name, weight in weights if "layers.1." in name and name.endswith("down_proj"))

    assert torch.equal(torch.cat([down_proj(rank) for rank in ranks]), down_proj(whole))
    torch.testing.assert_close(logits_of(ranks, monkeypatch), wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


def test_matrices_of_another_size_are_refused(tmp_path: Path) -> None:
    directory = save_packed(tmp_path / "m")
    weights = load_file(directory / "model.safetensors")
    for ending in ("blocks", "scales"):
        name = f"model.layers.0.mlp.experts.down_proj_{ending}"
        weights[name] = weights[name][:, : SIZES["hidden_size"] // 2].contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match="down_proj"):
        load_tiny(directory)


def test_a_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    directory = save_packed(tmp_path / "m")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match=r"lack 1 tensors, among them model.layers.0.mlp.experts.down_proj"):
        load_tiny(directory)


def test_other_models_in_mxfp4_are_refused(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "m", FAMILIES["qwen3-moe"]())
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"quantised \(mxfp4\)"):
        load_tiny(directory)
