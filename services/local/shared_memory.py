"""Files in /dev/shm that children mapped: removed once they are dead and no process maps them.

They are rare, as UCX unlinks its segments right after opening them.
"""

from pathlib import Path
from typing import Final

SHM: Final = Path("/dev/shm")  # noqa: S108  # looked at, not written to


class SharedMemoryFiles:
    def __init__(self) -> None:
        self._mapped: dict[int, set[str]] = {}  # by process id
        self._left_over: set[str] = set()  # by dead processes

    def remember(self, pid: int) -> None:
        """Call this while `pid` lives."""
        self._mapped.setdefault(pid, set()).update(_mapped(Path(f"/proc/{pid}")))

    def remove_files_of(self, pid: int) -> list[str]:
        """Unlink files of `pid`, now dead, and of earlier ones. Returns: the paths."""
        self._left_over |= self._mapped.pop(pid, set())
        orphans = {path for path in self._left_over if Path(path).exists()}
        if orphans:
            orphans -= {path for process in Path("/proc").glob("[0-9]*") for path in _mapped(process)}
        for path in orphans:
            Path(path).unlink(missing_ok=True)
        self._left_over = {path for path in self._left_over - orphans if Path(path).exists()}
        return sorted(orphans)


def _mapped(process: Path) -> set[str]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # ended, or another user's
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in lines if f" {SHM}/" in line)
    return {path for path in paths if not path.endswith(" (deleted)")}
