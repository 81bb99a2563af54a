"""Files of a model's directory, without torch."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelUnavailable

CONFIG_FILE: Final = "config.json"
# what GPT-2's config.json calls them
GPT2_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
LFS_POINTER: Final = b"version https://git-lfs"


def read_json(path: Path, kind: type = dict) -> Any:
    """Raises: ModelUnavailable, unless the file is the JSON of a `kind`."""
    try:
        found = json.loads(path.read_text())
    except OSError as exc:
        raise ModelUnavailable(f"{path} cannot be read: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelUnavailable(f"{path} is not the JSON of a model ({exc}): copy the one of the model again") from exc
    if not isinstance(found, kind):
        raise ModelUnavailable(f"{path} is not the JSON of a model: copy the one of the model again")
    return found


def read_size(path: Path, config: Mapping[str, Any], key: str) -> int:
    """Return a size from `config`, the content of `path` or a part of it.

    Raises: ModelUnavailable, if it is missing or not a positive integer.
    """
    size = config.get(key, config.get(GPT2_NAMES.get(key, key)))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModelUnavailable(f"{path}: {key} is {size!r}; it must be a positive integer")
    return size


def read_header(path: Path) -> bytes:
    """Return the JSON that starts a safetensors file, after its length in eight bytes.

    Raises: ModelUnavailable.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise ModelUnavailable(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull`")
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", start[:8]) if size >= 8 else (size,)
            if length > size - 8:
                raise ModelUnavailable(f"{path} is not a safetensors file, or truncated: fetch it again")
            file.seek(8)
            return file.read(length)
    except OSError as exc:
        raise ModelUnavailable(f"{path} cannot be read: {exc}") from exc


def read_tensors(path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name, with `dtype` and `shape`. Raises: ModelUnavailable."""
    try:
        tensors = dict(json.loads(read_header(path)))
    except ValueError as exc:
        raise ModelUnavailable(f"{path} is not a safetensors file: {exc}") from exc
    tensors.pop("__metadata__", None)
    return tensors
