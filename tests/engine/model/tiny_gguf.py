"""GGUF files of tiny models, written with llama.cpp's own package."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = [*LETTERS, "Ġ", "Ċ", "ab", "12", *(f"<extra{i}>" for i in range(27)), "<|im_end|>", "<bos>", "<|endoftext|>"]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    splitter: str | None = "qwen2",
    tokens: Sequence[str] = TOKENS,
    halves: Collection[str] = (),
    **fields: Any,
) -> Path:
    """Write weights of `model`, a Qwen 2, Llama or Gemma, in float32.

    Args:
        splitter: the value of tokenizer.ggml.pre; None: the vocabulary is SentencePiece's.
        tokens: the last two begin and end a text.
        halves: tensors in float16, by their names in transformers.
        fields: are added; "architecture" is the file's own.
    """
    config = model.config
    kind = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, fields.pop("architecture", kind))
    arch = writer.arch
    described = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.rope.freq_base": _rope_theta(config),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    for key, value in (described | fields).items():
        add = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    if splitter is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitter)
        writer.add_token_merges(["a b", "1 2"])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written, name
        stored = tensor.to(torch.float16 if name in halves else torch.float32)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1  # as llama.cpp's converter does
        writer.add_tensor(written, stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope_theta(config: Any) -> float:
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])
