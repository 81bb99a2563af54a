"""An adapter's identity: KV is shared only between equal ones."""

import hashlib
import json
from pathlib import Path
from typing import Final

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
INCIDENTAL: Final = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type")


def adapter_identity(directory: Path) -> str:
    """16 hex digits over configuration and all weights, because checkpoints of one training may differ little."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    for key in INCIDENTAL:
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (directory / ADAPTER_WEIGHTS).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(digest.digest() + weights).hexdigest()[:16]
