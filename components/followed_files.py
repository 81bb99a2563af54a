"""Files that are read again when they change, so that no restart is needed."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from components.startup import WrongSettings

log = logging.getLogger(__name__)

T = TypeVar("T")


class FollowedFiles(Generic[T]):
    """An unreadable change is logged once, and the last good content stays in use."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files = files
        self._read = read  # raises WrongSettings
        self._lock = threading.Lock()
        self._seen: object = None
        self._content: list[T] = []  # one item, or none before the first success

    def current(self) -> T:
        """Raises: WrongSettings, if the files could never be read."""
        with self._lock:
            seen = self._signature()
            if not self._content or seen != self._seen:
                self._renew(seen)
            return self._content[0]

    def _renew(self, seen: object) -> None:
        try:
            content = self._read()
        except WrongSettings as exc:
            if not self._content:
                raise
            log.warning("changed file not used, the earlier one stays in use", extra={"cause": exc.message})
        else:
            if self._signature() != seen:  # half of a pair may be replaced: the next call reads again
                self._content = self._content or [content]
                return
            if self._content:
                log.info("file read again", extra={"files": [str(path) for path in self._files]})
            self._content = [content]
        self._seen = seen

    def _signature(self) -> list[tuple[int, ...] | None]:
        return [stamp_of(path) for path in self._files]


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """A value that changes when the file changes or is replaced by a rename."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def read_file(path: Path, variable: str) -> bytes:
    """Raises: WrongSettings, which names the setting and the file."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise WrongSettings(f"{variable} {path}: {exc.strerror}") from exc
