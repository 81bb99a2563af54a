"""Weights in 8-bit floats and integers give the right matrices, whole and on ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from engine.errors import ModelUnavailable, UnsupportedModel
from tests.engine.model.families import FAMILIES, reference, reference_logits, save_model
from tests.engine.model.test_families import paged_logits
from tests.engine.sharding.test_families_on_ranks import PROMPT, logits_of, on_ranks
from tests.engine.tiny_engine import load_tiny

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
UNEVEN = [40, 24]  # rows and columns of a block; the last blocks of a matrix are smaller


def blocks_of(matrix: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Return the largest size in each block, [ceil(rows / block[0]), ceil(columns / block[1])]."""
    rows, columns = (-(-size // step) for size, step in zip(matrix.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    return padded.view(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def spread(scales: torch.Tensor, block: list[int], shape: torch.Size) -> torch.Tensor:
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def save_quantised(
    directory: Path,
    family: str,
    quantization: dict[str, Any],
    ending: str,
    sizes: Callable[[torch.Tensor], list[int]],
    dtype: torch.dtype = FP8,
) -> dict[str, torch.Tensor]:
    """Save two checkpoints: `directory/packed` has every layer's matrices in 8 bits, and `directory/plain` what they mean.

    Args:
        ending: of the scales' names.
        sizes: of a block of a matrix.
    Returns: the tensors of `packed`.
    """
    plain, packed = (save_model(directory / name, FAMILIES[family]()) for name in ("plain", "packed"))
    weights, meant = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        matrix, block = weights[name], sizes(weights[name])
        scales = blocks_of(matrix, block) / LARGEST[dtype]
        numbers = matrix / spread(scales, block, matrix.shape)
        weights[name] = numbers.to(dtype) if dtype.is_floating_point else numbers.round().to(dtype)
        weights[name + ending] = scales
        weights[name.removesuffix("weight") + "input_scale"] = torch.tensor(3.0)
        meant[name] = weights[name].float() * spread(scales, block, matrix.shape)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    describe(packed, quantization)
    return weights


def describe(directory: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


def groups(**weights: object) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"} | weights}},
    }


def whole(matrix: torch.Tensor) -> list[int]:
    return list(matrix.shape)


def each_row(matrix: torch.Tensor) -> list[int]:
    return [1, matrix.shape[1]]


def uneven(_matrix: torch.Tensor) -> list[int]:
    return UNEVEN


FORMATS = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": UNEVEN}, "_scale_inv", uneven),
    "one scale": ({"quant_method": "fp8", "weight_block_size": None}, "_scale_inv", whole),
    "rows": ({"quant_method": "fbgemm_fp8"}, "_scale", each_row),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", whole),
    "compressed rows": (groups(strategy="channel"), "_scale", each_row),
    "integers": (groups(type="int", symmetric=True, strategy="channel"), "_scale", each_row, torch.int8),
    "compressed blocks": (groups(strategy="block", block_structure=UNEVEN), "_scale", uneven),
}


@pytest.mark.parametrize("stored", list(FORMATS))
def test_weights_and_logits_are_those_of_the_unpacked_checkpoint(tmp_path: Path, stored: str) -> None:
    save_quantised(tmp_path, "qwen3", *FORMATS[stored])
    loaded = load_tiny(tmp_path / "packed", dtype="float32")
    truth = reference(tmp_path / "plain")
    wanted = truth.state_dict()
    for name, weight in loaded.module.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    assert not hasattr(loaded.module.config, "quantization_config")
    logits = reference_logits(truth, PROMPT)
    torch.testing.assert_close(
        paged_logits(loaded, PROMPT, 33, "auto"), logits, atol=2e-4 * float(logits.abs().max()), rtol=0
    )


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    save_quantised(tmp_path, "qwen3", *FORMATS["blocks"])
    meant = load_file(tmp_path / "plain" / "model.safetensors")
    for name, weight in load_tiny(tmp_path / "packed", dtype="bfloat16").module.state_dict().items():
        if name.endswith("down_proj.weight"):
            assert torch.equal(weight, meant[name].bfloat16())


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_weights_are_those_that_transformers_unpacks(tmp_path: Path, family: str) -> None:
    """With blocks that divide the matrices, as transformers requires."""
    block = [32, 32]
    quantization = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    save_quantised(tmp_path, family, quantization, "_scale_inv", lambda _matrix: block)
    truth = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed",
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    ).state_dict()
    for name, weight in load_tiny(tmp_path / "packed", dtype="float32").module.state_dict().items():
        torch.testing.assert_close(weight, truth[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "mixtral", "phi3", "deepseek-v3"])
def test_ranks_read_their_parts_of_blocks(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's rows begin in the middle of a block."""
    save_quantised(tmp_path, family, *FORMATS["blocks"])
    logits = reference_logits(reference(tmp_path / "plain"), PROMPT)
    for size in (2, 4):
        loaded = on_ranks(tmp_path / "packed", size, dtype="float32")
        torch.testing.assert_close(
            logits_of(loaded, monkeypatch), logits, atol=2e-4 * float(logits.abs().max()), rtol=0
        )


def change(directory: Path, weights: dict[str, torch.Tensor], **tensors: torch.Tensor | None) -> None:
    """Save `weights` with tensors of one layer's `up_proj` changed, or left out where None is given."""
    for name, tensor in tensors.items():
        weights.pop(full := f"model.layers.0.mlp.up_proj.{name}")
        weights |= {} if tensor is None else {full: tensor}
    save_file(weights, directory / "packed" / "model.safetensors", metadata={"format": "pt"})


def test_scales_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    weights = save_quantised(tmp_path, "qwen3", *FORMATS["blocks"])
    change(tmp_path, weights, weight_scale_inv=torch.ones(7, 3))
    expected = r"up_proj.weight has the shape \[96, 64\], and its scales have \[7, 3\]: .* each block of 40 by 24"
    with pytest.raises(UnsupportedModel, match=expected):
        load_tiny(tmp_path / "packed")


@pytest.mark.parametrize("scales", [None, torch.ones(3, 3, dtype=torch.uint8)])
def test_numbers_whose_scales_are_missing_or_integers_are_refused(tmp_path: Path, scales: torch.Tensor | None) -> None:
    weights = save_quantised(tmp_path, "qwen3", *FORMATS["blocks"])
    change(tmp_path, weights, weight_scale_inv=scales)
    with pytest.raises(UnsupportedModel, match=r"quantised \(model.layers.0.mlp.up_proj.weight.* is of "):
        load_tiny(tmp_path / "packed")


def test_matrices_of_another_size_are_refused(tmp_path: Path) -> None:
    weights = save_quantised(tmp_path, "qwen3", *FORMATS["blocks"])
    change(tmp_path, weights, weight=torch.ones(80, 64).to(FP8), weight_scale_inv=torch.ones(2, 3))
    with pytest.raises(ModelUnavailable, match=r"up_proj.weight is \(80, 64\), which should be \(96, 64\)"):
        load_tiny(tmp_path / "packed")


@pytest.mark.parametrize(
    "quantization",
    [
        groups(num_bits=4),
        groups(type="int"),
        groups(type="int", symmetric=False),
        groups() | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ],
)
def test_formats_of_the_same_libraries_with_other_numbers_are_refused(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    save_model(tmp_path, FAMILIES["qwen3"]())
    describe(tmp_path, quantization)
    with pytest.raises(UnsupportedModel, match=rf"quantised \({quantization['quant_method']}\)"):
        load_tiny(tmp_path)
