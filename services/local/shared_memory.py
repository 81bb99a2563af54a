"""Files in /dev/shm that a killed child leaves: remembered while it lives, removed once nobody maps them.

UCX unlinks its segments right after it has opened them, so usually there are none; a library that does not is caught
here. Only what a child of ours was seen to map is ever removed.
"""

from pathlib import Path
from typing import Final

SHM: Final = Path("/dev/shm")  # noqa: S108  # looked at, not written to


class SharedMemoryFiles:
    """What our children map from /dev/shm."""

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}
        self._of_the_dead: set[str] = set()

    def remember(self, pid: int) -> None:
        """Note what `pid` maps now; call it while the process lives, at the latest before a signal."""
        self._seen.setdefault(pid, set()).update(_mapped(Path(f"/proc/{pid}")))

    def remove_files_of(self, pid: int) -> list[str]:
        """Unlink what `pid`, now dead, and the dead before it mapped and nobody maps any more. Returns: the paths."""
        self._of_the_dead |= self._seen.pop(pid, set())
        orphans = {path for path in self._of_the_dead if Path(path).exists()}
        if orphans:
            orphans -= {path for process in Path("/proc").glob("[0-9]*") for path in _mapped(process)}
        for path in orphans:
            Path(path).unlink(missing_ok=True)
        self._of_the_dead = {path for path in self._of_the_dead - orphans if Path(path).exists()}
        return sorted(orphans)


def _mapped(process: Path) -> set[str]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # gone, or not ours to read
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in lines if f" {SHM}/" in line)
    return {path for path in paths if not path.endswith(" (deleted)")}
