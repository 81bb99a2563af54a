"""PEFT's adapter_config.json: supported and refused settings, and the adapter's identity."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelUnavailable, UnsupportedModel

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
INCIDENTAL: Final = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type")
ALL_LINEAR: Final = "all-linear"
# values of init_lora_weights; others change the model's own weights
PLAIN_STARTS: Final = (True, False, None, "gaussian", "orthogonal", "eva")
USED: Final = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "bias",
})  # fmt: skip
# settings about origin and training
WITHOUT_EFFECT: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "ensure_weight_tying",
})  # fmt: skip
# reasons for common keys; other unknown keys are refused as well
REFUSED: Final = {
    "use_dora": "it is weight-decomposed (DoRA)",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "lora_bias": "it changes biases (lora_bias)",
    "fan_in_fan_out": "its weights are transposed (fan_in_fan_out)",
    "trainable_token_indices": "it changes embeddings (trainable_token_indices)",
    "target_parameters": "it changes parameters outside of linear layers (target_parameters)",
}


def adapter_identity(directory: Path) -> str:
    """Return a hash, because only equal adapters may share KV.

    It includes all weights, because checkpoints of one training may differ in few.
    """
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    for key in INCIDENTAL:
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (directory / ADAPTER_WEIGHTS).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(digest.digest() + weights).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int
    alpha: float
    rank_stabilised: bool  # rsLoRA, arXiv:2312.03732: alpha is divided by the root of the rank
    ranks: Mapping[str, int]  # by pattern for the end of layers' names
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]  # "all-linear", a regular expression, or ends of names
    excluded: str | tuple[str, ...]
    some_layers: bool  # `targets` apply to some layers only

    def rank_of(self, layer: str) -> int:
        return int(_by_pattern(self.ranks, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        return _by_pattern(self.alphas, layer, self.alpha) / (sqrt(rank) if self.rank_stabilised else rank)

    def names(self, layer: str) -> bool:
        wanted = self.targets == ALL_LINEAR or _matches(self.targets, layer)
        return wanted and not _matches(self.excluded, layer)


def read_adapter_config(name: str, directory: Path) -> AdapterConfig:
    """Raises: ModelUnavailable; UnsupportedModel, if there is more than low-rank changes of linear layers."""
    path = directory / ADAPTER_CONFIG
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else exc
        raise ModelUnavailable(f"LoRA adapter {name!r}: {path} cannot be read: {cause}") from exc
    if not isinstance(given, dict):
        raise ModelUnavailable(f"LoRA adapter {name!r}: {path} is not a JSON object")
    if reasons := _reasons_against(given):
        raise UnsupportedModel(f"LoRA adapter {name!r} is not supported: {'; '.join(reasons)}")
    try:
        return AdapterConfig(
            rank=_positive(given["r"]),
            alpha=float(given["lora_alpha"]),
            rank_stabilised=bool(given.get("use_rslora")),
            ranks={key: _positive(value) for key, value in (given.get("rank_pattern") or {}).items()},
            alphas={key: float(value) for key, value in (given.get("alpha_pattern") or {}).items()},
            targets=_layers(given["target_modules"]),
            excluded=_layers(given.get("exclude_modules") or ()),
            some_layers=given.get("layers_to_transform") is not None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as exc:
        raise ModelUnavailable(f"LoRA adapter {name!r}: {path} is not PEFT's ({type(exc).__name__}: {exc})") from exc


def _reasons_against(given: Mapping[str, Any]) -> list[str]:
    start = given.get("init_lora_weights")
    reasons = {
        f"it is of type {given.get('peft_type')}": given.get("peft_type") != "LORA",
        "it changes biases": given.get("bias", "none") != "none",
        f"it begins from {start}, which changes the model's own weights": start not in PLAIN_STARTS,
    }
    unknown = sorted(key for key, value in given.items() if value and key not in USED | WITHOUT_EFFECT)
    found = [reason for reason, applies in reasons.items() if applies]
    return found + [REFUSED.get(key, f"it sets {key}") for key in unknown]


def _by_pattern(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """Return the value of the first pattern that matches the name, or its end after a dot, as in PEFT."""
    found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", layer))
    return next(found, default)


def _matches(patterns: str | tuple[str, ...], layer: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, layer) is not None
    return any(layer == ending or layer.endswith(f".{ending}") for ending in patterns)


def _layers(given: object) -> str | tuple[str, ...]:
    if isinstance(given, str):
        if given != ALL_LINEAR:
            re.compile(given)
        return given
    if isinstance(given, list | tuple) and all(isinstance(ending, str) for ending in given):
        return tuple(given)
    raise ValueError(f"{given!r} names no layers")


def _positive(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a rank")
    return value
