"""Files of a model's directory, without torch."""

import json
import struct
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelUnavailable

CONFIG_FILE: Final = "config.json"
LFS_POINTER: Final = b"version https://git-lfs"


def read_json(path: Path) -> Any:
    """Raises: ModelUnavailable."""
    try:
        return json.loads(path.read_text())
    except OSError as exc:
        raise ModelUnavailable(f"{path} cannot be read: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelUnavailable(f"{path} is not the JSON of a model ({exc}): copy the one of the model again") from exc


def read_header(path: Path) -> bytes:
    """Return the JSON that starts a safetensors file, after its length in eight bytes.

    Raises: ModelUnavailable.
    """
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


def read_tensors(path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name, each with `dtype` and `shape`.

    Raises: ModelUnavailable.
    """
    try:
        tensors = dict(json.loads(read_header(path)))
    except ValueError as exc:
        raise ModelUnavailable(f"{path} is not a safetensors file: {exc}") from exc
    tensors.pop("__metadata__", None)
    return tensors
