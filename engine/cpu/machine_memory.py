"""Available memory of the machine or container, and available space on disks."""

import os
from pathlib import Path
from typing import Final

from components.startup import WrongSettings

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the memory that is available without swapping; None if unknown."""
    amounts = [amount for amount in (_of_machine(proc), *_of_container(cgroups)) if amount is not None]
    return min(amounts, default=None)


def check_fits(num_bytes: int, what: str) -> None:
    """Raises: WrongSettings, if not enough memory is available. `what` names its use and the setting."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise WrongSettings(
            f"{what} need {num_bytes / 1e9:.1f} GB, but only {available / 1e9:.1f} GB of memory are free here"
        )


def check_fits_in(directory: Path, num_bytes: int, what: str) -> None:
    """Check that `directory` is writable and its disk has enough space. `what` names the use and the setting.

    Raises: WrongSettings.
    """
    directory = directory.expanduser()
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise WrongSettings(f"{what} need a writable directory, and {directory} is not one")
    stats = os.statvfs(directory)
    available = stats.f_bavail * stats.f_frsize
    if num_bytes > available:
        raise WrongSettings(
            f"{what} need {num_bytes / 1e9:.1f} GB, but only {available / 1e9:.1f} GB are free in {directory}"
        )


def _of_machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroups: Path) -> list[int]:
    """Return the memory that the cgroup's limit leaves, including that of cached files."""
    found = []
    for limit, used, statistics, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        texts = _lines(cgroups / limit), _lines(cgroups / used)
        if not all(text and text[0].isdigit() for text in texts):  # "max": no limit
            continue
        given_up = [int(line.split()[1]) for line in _lines(cgroups / statistics) if line.startswith(f"{cache} ")]
        found.append(max(0, int(texts[0][0]) - int(texts[1][0]) + sum(given_up)))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
