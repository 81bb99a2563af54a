"""The model directory of `mock`: SmolLM2's shape, and a tokenizer whose tokens are bytes."""

import json
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from components.text.byte_letters import byte_letters

MOCK: Final = "mock"
PREFIX: Final = "mock:"  # `mock:<model>` has that model's tokenizer, vocabulary and KV shape
START, END = "<|im_start|>", "<|im_end|>"
SPECIAL: Final = {START: 256, END: 257}  # after the 256 bytes
LETTERS: Final = [*b" abcdefghijklmnopqrstuvwxyz"]  # the generated tokens

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "vocab_size": 258,
    "eos_token_id": SPECIAL[END],
}
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def inner_model(model: str) -> str | None:
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else None


def is_mock(model: str) -> bool:
    return model == MOCK or model.startswith(PREFIX)


def mock_dir(models: Path) -> Path:
    """Write what is missing or of another release."""
    directory = models / MOCK
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _files().items():
        _write(directory / name, json.dumps(content))
    return directory


def _files() -> dict[str, dict[str, Any]]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {char: byte for byte, char in enumerate(byte_letters())} | SPECIAL
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": content, **flags} for content, i in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    return {"config.json": CONFIG, "tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _write(path: Path, text: str) -> None:
    """Write by a rename, because several workers may start at once."""
    if path.is_file() and path.read_text() == text:
        return
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    draft.write_text(text)
    draft.replace(path)
