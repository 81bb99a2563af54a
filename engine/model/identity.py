"""The identity of loaded weights: workers exchange KV only if theirs are equal."""

import hashlib
import json
from pathlib import Path
from typing import Final

from engine.model.model_files import CONFIG_FILE, read_header

SAMPLES: Final = 16  # of each weight file
SAMPLE_BYTES: Final = 4096
INCIDENTAL: Final = ("transformers_version", "_name_or_path", "architectures")  # may differ between equal weights


def weights_identity(name: str, directory: Path) -> str:
    """`name@hash` over configuration, tensor table, size and samples of each safetensors file.

    Whole files would take seconds. Fine-tunes of one base differ in the samples.

    Raises: ModelUnavailable.
    """
    digest = _config_digest(directory)
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        header = read_header(path)
        digest.update(header)
        sample_file(digest, path, 8 + len(header))
    return f"{name}@{digest.hexdigest()[:12]}"


def random_identity(name: str, directory: Path, seed: int, device: str) -> str:
    """Include the device, because equal seeds give equal weights only on equal devices."""
    return f"{name}@random{seed}-{device}-{_config_digest(directory).hexdigest()[:12]}"


def sample_file(digest: "hashlib._Hash", path: Path, start: int = 0) -> None:
    """Add a file's size, and evenly spaced samples from `start` on."""
    size = path.stat().st_size
    digest.update(f"\0{size}\0".encode())
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(start + (size - start) * i // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))


def _config_digest(directory: Path) -> "hashlib._Hash":
    config = json.loads((directory / CONFIG_FILE).read_text())
    for key in INCIDENTAL:
        config.pop(key, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode())
