"""Adapters of random weights in PEFT's files, and the same weights merged into the model by hand."""

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    directory: Path,
    model_dir: Path,
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of every layer whose name ends in one of `targets`; `ranks` where a layer's is another one."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in linears(model_dir):
        ending = name.rpartition(".")[2]
        if ending in targets:
            r = (ranks or {}).get(ending, rank)
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(r, layer.in_features, generator=draw) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(layer.out_features, r, generator=draw) * 0.2
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "somewhere/else",
        "bias": "none",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return directory


def merge(model_dir: Path, adapter: Path, target: Path) -> Path:
    """The model with W + scale * B A in place of each W that the adapter changes."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, layer in model.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is None:
            continue
        up = tensors[f"base_model.model.{name}.lora_B.weight"]
        rank = down.shape[0]
        alpha = config["alpha_pattern"].get(name.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
        with torch.no_grad():
            layer.weight += scale * (up @ down)
    model.save_pretrained(target)
    return target


def linears(model_dir: Path) -> list[tuple[str, torch.nn.Linear]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
