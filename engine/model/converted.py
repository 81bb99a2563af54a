"""Models that come as a GGUF file: converted to safetensors once, into a directory that everyone then uses."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    waiting = f"Waiting for another process that converts {name}"
    with _locked(models_dir / f".{name}.lock", lambda over: progress(waiting, over, 1)) as lock:
        if not done.is_dir():
            partial = models_dir / f".{done.name}.partial"
            was_interrupted = partial.exists()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            file = source()
            again = "again, as it was interrupted" if was_interrupted else "once"
            task = f"Converting {name} to safetensors ({again}; about {_seconds(file)} s)"
            _convert(task, file, [partial, done, json.dumps(generation)], lock, progress)
    return done


def finish(partial: Path, done: Path, generation: Mapping[str, float | bool]) -> None:
    """Make what a conversion has written to `partial` the model `done`, whole on the disk before it has that name."""
    path = partial / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}, indent=2) + "\n")
    for written in [*partial.iterdir(), partial]:
        handle = os.open(written, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    partial.rename(done)


def _seconds(file: Path) -> int:
    """How long a conversion takes, roughly: as measured on two cores, 100 MB in half a minute."""
    return 10 + 10 * round(file.stat().st_size / 50e6)


@contextmanager
def _locked(path: Path, waiting: Callable[[int], object]) -> Iterator[IO[str]]:
    """Hold `path` against other processes; released by closing, hence also by dying.

    `waiting` is called with 0 when another process has it, and with 1 when that is over.
    """
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting(1)
        yield lock


def _convert(task: str, source: Path, finishing: Sequence[Path | str], lock: IO[str], progress: Progress) -> None:
    """Run `engine.model.convert` in a process of its own: its memory goes with it, and torch stays out of this one.

    The child inherits the lock, and gives the result its name: if we are killed, nobody else converts meanwhile, and what
    it has done is used.
    """
    command = [sys.executable, "-m", "engine.model.convert", str(source), *map(str, finishing)]
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
                progress(task, int(done), int(total))
            elif line.startswith(REASON_MARK):
                reason = line.removeprefix(REASON_MARK).strip()
            else:
                said.append(line)
    if child.returncode:
        raise ModelUnavailable(f"{source} could not be converted: {reason}" if reason else _last_words(source, said))


def _last_words(source: Path, said: deque[str]) -> str:
    return f"{source} could not be converted:\n{''.join(said)}"
