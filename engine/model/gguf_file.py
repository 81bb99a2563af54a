"""GGUF files by path. Needs neither torch nor gguf."""

import hashlib
from pathlib import Path
from typing import Final

from engine.model.errors import ModelUnavailable
from engine.model.identity import sample_file

SUFFIX: Final = ".gguf"


def gguf_file(path: Path) -> Path | None:
    """The file itself, or the only one in a directory; None for a directory with other weights.

    Raises: ModelUnavailable, for a missing file and a directory with several.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise ModelUnavailable(f"there is no file {path}")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ModelUnavailable(
            f"{path} holds {len(found)} GGUF files, name one of them: {', '.join(file.name for file in found)}"
        )
    return found[0] if found else None


def content_key(path: Path) -> str:
    """Eight hex digits over the file's size and samples of it, independent of path and time."""
    digest = hashlib.sha256()
    sample_file(digest, path)
    return digest.hexdigest()[:8]
