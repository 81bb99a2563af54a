"""Models that come as a GGUF file: converted to safetensors once, into a directory that everyone then uses."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from engine.model.errors import ModelUnavailable
from engine.model.progress import Progress

PROGRESS_MARK: Final = "progress\t"  # begins a line of `engine.model.convert` that tells how far it is
REASON_MARK: Final = "reason\t"  # and one that tells why it gives up


def converted_dir(
    name: str,
    key: str,
    models_dir: Path,
    progress: Progress,
    *,
    source: Callable[[], Path],
    generation: Mapping[str, float | bool],
) -> Path:
    """Directory `<name>-<key>` below `models_dir`, converted from a GGUF file if it is not there yet.

    The result appears by one rename, so whoever sees it sees all of it; a lock makes others wait for the first.

    Args:
        name: for people.
        key: changes with the content of the file.
        models_dir: made where it is not there.
        progress: called while it converts.
        source: the file, asked for only when it is needed.
        generation: sampling defaults, which a GGUF file does not say.
    Raises: ModelUnavailable, and what `source` raises.
    """
    done = models_dir / f"{name}-{key}"
    if done.is_dir():
        return done
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f".{name}.lock") as lock:
        if not done.is_dir():
            partial = models_dir / f".{done.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
            partial.mkdir()
            _convert(name, source(), partial, lock, progress)
            _recommend(partial / "generation_config.json", generation)
            partial.rename(done)
    return done


def _recommend(path: Path, generation: Mapping[str, float | bool]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}, indent=2) + "\n")


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
    reason = ""
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
            elif line.startswith(REASON_MARK):
                reason = line.removeprefix(REASON_MARK).strip()
            else:
                said.append(line)
    if child.returncode:
        raise ModelUnavailable(f"{source} could not be converted: {reason}" if reason else _last_words(source, said))


def _last_words(source: Path, said: deque[str]) -> str:
    return f"{source} could not be converted:\n{''.join(said)}"
