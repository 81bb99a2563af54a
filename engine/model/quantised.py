"""How a checkpoint's weights are quantised, by its config.json, and which formats are unpacked at load."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.sharding import eight_bits, mxfp4

# of tensors by name, read as `safe_open(...).get_slice` gives them
Unpack = Callable[[Mapping[str, Any]], dict[str, Any]]


def method_of(config: Any) -> str:
    """Return "" if the weights are not quantised."""
    found = _about(config)
    return str(found.get("quant_method") or "by a method that config.json does not name") if found else ""


def unpacker(config: Any) -> Unpack | None:
    """Return what unpacks weights as they are read; None for plain weights and for other formats."""
    about = _about(config)
    match method_of(config):
        case "mxfp4" if config.model_type == "gpt_oss":
            return mxfp4.joined
        case "fp8":
            return partial(eight_bits.joined, block=_block(about.get("weight_block_size")))
        case "fbgemm_fp8":
            return partial(eight_bits.joined, block=None)
        case "modelopt" if about.get("quant_algo") == "FP8":
            return partial(eight_bits.joined, block=None)
        case "compressed-tensors" if not about.get("transform_config"):  # weights of rotated activations
            groups = [group.get("weights") or {} for group in dict(about.get("config_groups") or {}).values()]
            if groups and all(map(_has_eight_bits, groups)):
                blocks = [block for group in groups if (block := _block(group.get("block_structure")))]
                return partial(eight_bits.joined, block=blocks[0] if blocks else None)
    return None


def forget_quantisation(config: Any) -> None:
    """Remove the description of quantised weights, by which transformers would choose kernels."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config


def _about(config: Any) -> dict[str, Any]:
    for each in (config, config.get_text_config()):
        if found := getattr(each, "quantization_config", None):
            return dict(found if isinstance(found, dict) else found.to_dict())
    return {}


def _has_eight_bits(weights: Mapping[str, Any]) -> bool:
    kind = weights.get("type")
    return weights.get("num_bits") == 8 and (kind == "float" or (kind == "int" and weights.get("symmetric") is True))


def _block(sizes: Any) -> eight_bits.Block | None:
    match sizes:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None
