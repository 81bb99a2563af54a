"""The state directory of a run: one mesh at a time holds it."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Final

from components.local_mesh import started_at
from services.local.child_process import CannotStart

RUNNING_FILE: Final = "running.json"
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class RunningFile:
    """`running.json`: how to reach this mesh, for `services.inspect` and a second `services.local`."""

    def __init__(self, stream: FileIO) -> None:
        """`stream` has no buffer: what a full disk refused must not be written again when it is closed."""
        self._stream = stream

    def write(self, **facts: Any) -> None:
        self._stream.truncate(0)
        left = (json.dumps({"pid": os.getpid(), "started": started_at(os.getpid()), **facts}, indent=2) + "\n").encode()
        while left:
            left = left[self._stream.write(left) :]


@contextmanager
def own_state(state_dir: Path, http: list[str]) -> Iterator[tuple[Path, RunningFile]]:
    """Hold `<state_dir>/local`. Raises: CannotStart, naming the holder."""
    home = state_dir / "local"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)  # an earlier run may have left another mode
        stream = FileIO(home / RUNNING_FILE, "a+")
        os.fchmod(stream.fileno(), 0o600)
    with stream:
        file = RunningFile(stream)
        with writing(home):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it however we die
            except BlockingIOError as exc:
                held = f"{state_dir} is used by {_holder(home)}"
                raise CannotStart(f"{held}: stop it or choose another --state-dir") from exc
            file.write(http=http)
        try:
            yield home, file
        finally:
            stream.truncate(0)


@contextmanager
def writing(home: Path) -> Iterator[None]:
    """Raises: CannotStart, for an error of a file in `home`."""
    try:
        yield
    except OSError as exc:
        free = "free some space or " if exc.errno in NO_SPACE else ""
        where = exc.filename or home
        raise CannotStart(f"cannot write {where}: {exc.strerror}; {free}choose another --state-dir") from exc


def _holder(home: Path) -> str:
    try:
        facts = json.loads((home / RUNNING_FILE).read_text())
        return f"a running services.local (pid {facts['pid']}, {', '.join(facts['http'])})"
    except (OSError, ValueError, LookupError):  # being written
        return "another services.local"


@contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """Return a new directory. An earlier run may have left one, which is removed."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
