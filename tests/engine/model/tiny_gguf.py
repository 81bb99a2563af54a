"""A GGUF file of a tiny Qwen 2, written with llama.cpp's own package."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

LETTERS = [chr(code) for code in range(33, 127)]
TOKENS = [*LETTERS, "Ġ", "Ċ", "ab", *(f"<extra{i}>" for i in range(29)), "<bos>", "<|endoftext|>"]


def write_gguf(path: Path, model: PreTrainedModel, **fields: Any) -> Path:
    """Weights of `model` in float32; `fields` are added, None leaves one out, and "architecture" is the file's own."""
    config = model.config
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "qwen2"))
    arch = writer.arch
    described = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        "tokenizer.ggml.bos_token_id": TOKENS.index("<bos>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|endoftext|>"),
    }
    for key, value in (described | fields).items():
        writer.add_uint32(key, value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in TOKENS])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written, name
        writer.add_tensor(written, tensor.to(torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
