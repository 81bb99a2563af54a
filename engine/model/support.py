"""Refuse unsupported models at load, before weights are read."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.attention.latent import expands_latents, latent_size
from engine.errors import UnsupportedModel
from engine.model.model_files import read_tensors
from engine.model.quantised import method_of, unpacker
from engine.sharding.eight_bits import EIGHT_BITS, SCALES

LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
NARROW: Final = ("F4", "F6", "F8")  # prefixes of safetensors' dtypes
INTEGER: Final = ("I", "U")
NEEDED: Final = ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")


def check_config(name: str, config: Any) -> None:
    """Check all but attention, for which there is `engine.model.probe`. Raises: UnsupportedModel."""
    try:
        found = [reason for reason, applies in _reasons(config).items() if applies]
    except RuntimeError as exc:  # raised if the layers differ
        found = [str(exc)]
    if found:
        raise UnsupportedModel(f"{name} is not supported: {'; '.join(found)}")


def _reasons(config: Any) -> dict[str, Any]:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {f"transformers has no text generation for {config.model_type}": True}
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or LAYER_TYPES)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    method = "" if unpacker(config) else method_of(config)
    return {
        _quantised(method): method,
        "it is not a decoder-only model": config.is_encoder_decoder,
        f"its layers are of the kinds {sorted(layer_types)}": not layer_types <= LAYER_TYPES,
        f"transformers {transformers.__version__} cannot keep its compressed keys and values (MLA)": latent_size(text)
        and not expands_latents(model_class),
        f"{model_class.__name__} has no exchangeable attention": not model_class._supports_attention_backend,
        f"{model_class.__name__} keeps a recurrent state": model_class._is_stateful,
        "its configuration does not give heads, layers, width and positions under the usual names": not all(
            getattr(text, name, None) for name in NEEDED
        ),
        "its layers differ in shape": not isinstance(getattr(text, "head_dim", None), int | None),
    }


def _quantised(method: str) -> str:
    return (
        f"its weights are quantised ({method}), which this engine does not compute; take the model's "
        "unquantised checkpoint, or a GGUF file of it, whose weights become bfloat16"
    )


def check_stored(name: str, files: Iterable[Path], unpacked: bool) -> None:
    """Check dtypes, as a quantised model's config.json may not mention it. `unpacked`: 8-bit numbers with scales are allowed.

    Raises: UnsupportedModel, ModelUnavailable.
    """
    tensors = {tensor: str(about["dtype"]) for path in files for tensor, about in read_tensors(path).items()}
    for tensor, dtype in tensors.items():
        if unpacked and dtype in EIGHT_BITS and any(tensor + ending in tensors for ending in SCALES):
            continue
        # integer tensors may be masks and positions, which are not weights
        if dtype.startswith(NARROW) or (dtype.startswith(INTEGER) and "weight" in tensor.rpartition(".")[2]):
            raise UnsupportedModel(f"{name} is not supported: {_quantised(f'{tensor} is of {dtype}')}")


def check_unexpected(name: str, module: Any, keys: Iterable[str]) -> None:
    """Refuse extra tensors of layers that the model has, such as biases and scales. `keys`: tensors without a place.

    Others belong to parts that are not computed here, such as a vision tower.

    Raises: UnsupportedModel.
    """
    if found := sorted(key for key in keys if _has_layer_of(module, key)):
        raise UnsupportedModel(
            f"{name} is not supported: its weights hold {found[0]}, for which the model of its config.json has no "
            f"place{f', and {len(found) - 1} more' if found[1:] else ''}. The two are not of one model, or need other code"
        )


def _has_layer_of(module: Any, key: str) -> bool:
    parent = key.rpartition(".")[0]
    return any(list(layer.parameters(recurse=False)) for layer in _layers(module, parent))


def _layers(module: Any, name: str) -> Iterator[Any]:
    for full in (name, f"{module.base_model_prefix}.{name}"):  # a base model's file has no prefix
        try:
            yield module.get_submodule(full)
        except AttributeError:
            continue


def max_positions(config: Any) -> int:
    """Return the longest context in which rotary frequencies do not depend on the batch.

    transformers' "longrope" switches them when any position of the batch exceeds the original context. Cached keys keep
    the old ones.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    each = list(ropes.values()) if all(isinstance(rope, dict) for rope in ropes.values()) else [ropes]
    limits = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    return min([config.max_position_embeddings, *limits])
