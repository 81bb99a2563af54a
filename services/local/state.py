"""The directory of one running mesh: `<state_dir>/local`, for one `services.local` at a time.

`running.json` in it is locked while the mesh runs and says how to reach it, for a second `services.local` to name the
holder and for `services.inspect` to find the servers; it is empty after a clean stop.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from services.local.process import CannotStart

FILE: Final = "running.json"


class RunningFile:
    """The locked `running.json`."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def tell(self, **facts: str | int | list[str] | None) -> None:
        """Replace its content with our pid and `facts`."""
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write(json.dumps({"pid": os.getpid(), **facts}, indent=2) + "\n")
        self._stream.flush()


@contextmanager
def own_state(state_dir: Path, http: list[str]) -> Iterator[tuple[Path, RunningFile]]:
    """`<state_dir>/local`, ours until the block ends. Raises: CannotStart, naming who holds it."""
    home = state_dir / "local"
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)  # it holds passwords; an earlier run may have made it with another mode
        stream = (home / FILE).open("a+")
        os.fchmod(stream.fileno(), 0o600)
    except OSError as exc:
        raise CannotStart(f"cannot write {home}: {exc.strerror}; choose another --state-dir") from exc
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it however we die
        except BlockingIOError as exc:
            raise CannotStart(f"{state_dir} is used by {_holder(home)}: stop it, or give another --state-dir") from exc
        running = RunningFile(stream)
        running.tell(http=http)
        try:
            yield home, running
        finally:
            stream.truncate(0)


def _holder(home: Path) -> str:
    try:
        facts = json.loads((home / FILE).read_text())
        return f"a services.local that runs (pid {facts['pid']}, {', '.join(facts['http'])})"
    except (OSError, ValueError, LookupError):  # it is just writing
        return "another services.local"
