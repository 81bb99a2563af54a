"""Available memory of the machine or container."""

from pathlib import Path
from typing import Final

from components.startup import WrongSettings

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return what is available without swapping; None if unknown."""
    amounts = [amount for amount in (_of_machine(proc), *_of_container(cgroups)) if amount is not None]
    return min(amounts, default=None)


def check_fits(num_bytes: int, what: str) -> None:
    """Raises: WrongSettings, if not enough memory is available. `what` names its use and the setting."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise WrongSettings(
            f"{what} need {num_bytes / 1e9:.1f} GB, but only {available / 1e9:.1f} GB of memory are free here"
        )


def _of_machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroups: Path) -> list[int]:
    """Return what the cgroup's limit leaves, including cached files."""
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
