"""What this engine cannot compute right is refused at load, by the model's name."""

from typing import Any

from engine.model.errors import UnsupportedModel


def check_config(name: str, config: Any) -> None:
    """Raises: UnsupportedModel, when the configuration asks for attention other than full causal softmax."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    reasons = {
        "it is not a decoder-only model": config.is_encoder_decoder,
        f"its layers are of the kinds {sorted(layer_types)}": layer_types != {"full_attention"},
        "its attention has a sliding window": windowed,
        "its attention caps logits": getattr(text, "attn_logit_softcapping", None),
        "it compresses keys and values (MLA)": getattr(text, "kv_lora_rank", None),
        "its configuration does not give heads, layers, width and positions under the usual names": not all(
            getattr(text, field, None)
            for field in ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")
        ),
    }
    _refuse(name, reasons)


def check_model(name: str, module: Any) -> None:
    """Raises: UnsupportedModel, when the model class cannot use our attention or keeps state beside KV."""
    kind = type(module).__name__
    reasons = {
        f"{kind} has no exchangeable attention": not getattr(module, "_supports_attention_backend", False),
        f"{kind} keeps a recurrent state": getattr(module, "_is_stateful", False),
    }
    _refuse(name, reasons)


def _refuse(name: str, reasons: dict[str, Any]) -> None:
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UnsupportedModel(f"{name} is not supported: {'; '.join(found)}")
