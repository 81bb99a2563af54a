"""Models converted from GGUF files, once, into a directory that processes share."""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from engine.errors import ModelUnavailable
from engine.model.progress import Progress

log = logging.getLogger(__name__)

VERSION: Final = 3  # a new one converts models again
PROGRESS_MARK: Final = "progress\t"
REASON_MARK: Final = "reason\t"
WARNING_MARK: Final = "warning\t"


def converted_dir(
    name: str,
    key: str,
    models_dir: Path,
    progress: Progress,
    *,
    source: Callable[[], Path],
    generation: Mapping[str, float | bool],
) -> Path:
    """Return the directory `<name>-<key>-v<VERSION>`, converted if it does not exist.

    It appears complete, by a rename. A lock makes other processes wait.

    Args:
        name: for humans.
        key: changes with the file's content.
        source: returns the file; called only if it is needed.
        generation: sampling defaults, which a GGUF file lacks.
    Raises: ModelUnavailable, and errors of `source`.
    """
    done = models_dir / f"{name}-{key}-v{VERSION}"
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
            task = f"Converting {name} ({again}; about {_seconds(file)} s)"
            _convert(task, file, [partial, done, json.dumps(generation)], lock, progress)
    return done


def finish(partial: Path, done: Path, generation: Mapping[str, float | bool]) -> None:
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
    """Estimate a conversion's duration: half a minute for 100 MB on two cores."""
    return 10 + 10 * round(file.stat().st_size / 50e6)


@contextmanager
def _locked(path: Path, waiting: Callable[[int], object]) -> Iterator[IO[str]]:
    """Lock `path` until it is closed or this process dies. Calls `waiting` with 0 before it waits, and with 1 after."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting(1)
        yield lock


def _convert(task: str, source: Path, finishing: Sequence[Path | str], lock: IO[str], progress: Progress) -> None:
    """Convert in a child process, so that this one needs neither torch nor the memory.

    The child inherits the lock, which holds if this process is killed.
    """
    command = [sys.executable, "-m", "engine.model.convert", str(source), *map(str, finishing)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    lines: deque[str] = deque(maxlen=20)
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
            elif line.startswith(WARNING_MARK):
                log.warning(
                    "the conversion of a GGUF file may be wrong",
                    extra={"file": str(source), "reason": line.removeprefix(WARNING_MARK).strip()},
                )
            else:
                lines.append(line)
    if child.returncode:
        cause = f": {reason}" if reason else f":\n{''.join(lines)}"
        raise ModelUnavailable(f"{source} could not be converted{cause}")
