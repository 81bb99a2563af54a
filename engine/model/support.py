"""Refuse unsupported models at load, before weights are read."""

from typing import Any, Final

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.errors import UnsupportedModel

LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
NEEDED: Final = ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")


def check_config(name: str, config: Any) -> None:
    """Check all but attention, which `engine.model.probe` checks.

    Raises: UnsupportedModel.
    """
    try:
        found = [reason for reason, applies in _reasons(config).items() if applies]
    except RuntimeError as exc:  # raised by configurations whose layers differ
        found = [str(exc)]
    if found:
        raise UnsupportedModel(f"{name} is not supported: {'; '.join(found)}")


def _reasons(config: Any) -> dict[str, Any]:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {f"transformers has no text generation for {config.model_type}": True}
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or LAYER_TYPES)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return {
        f"its weights are quantised ({_quantisation(config)}), which this engine does not compute; take the model's "
        "unquantised checkpoint, or a GGUF file of it, whose weights become bfloat16": _quantisation(config),
        "it is not a decoder-only model": config.is_encoder_decoder,
        f"its layers are of the kinds {sorted(layer_types)}": not layer_types <= LAYER_TYPES,
        "it compresses keys and values (MLA)": getattr(text, "kv_lora_rank", None),
        f"{model_class.__name__} has no exchangeable attention": not model_class._supports_attention_backend,
        f"{model_class.__name__} keeps a recurrent state": model_class._is_stateful,
        "its configuration does not give heads, layers, width and positions under the usual names": not all(
            getattr(text, name, None) for name in NEEDED
        ),
        "its layers differ in shape": not isinstance(getattr(text, "head_dim", None), int | None),
    }


def _quantisation(config: Any) -> str:
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "by a method that config.json does not name")


def max_positions(config: Any) -> int:
    """Longest context in which a request's rotary frequencies do not depend on its batch.

    transformers' "longrope" switches frequencies when any position of the batch exceeds the original context.
    Cached keys keep the old ones.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    each = list(ropes.values()) if all(isinstance(rope, dict) for rope in ropes.values()) else [ropes]
    limits = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    return min([config.max_position_embeddings, *limits])
