"""Progress of long tasks: bars on a terminal, a line at the start, each quarter and the end elsewhere."""

from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PARTS: Final = 4


class ProgressLines:
    """The tasks under way, of all services. `say` prints one line under a service's name."""

    def __init__(self, console: Console, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._bars = (
            Progress(
                TextColumn("{task.fields[service]}  {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._parts: dict[tuple[str, str], int] = {}  # of PARTS, what was last told of a task

    def update(self, name: str, task: str, done: object, total: object) -> None:
        """`name` has done `done` of `total` of `task`; an event without sensible numbers is no progress."""
        if not isinstance(done, int | float) or not isinstance(total, int | float) or total <= 0:
            return
        key, part = (name, task), min(PARTS, int(PARTS * done / total))
        if self._bars is not None and key not in self._tasks:
            self._bars.start()  # again, when all bars had ended
            self._tasks[key] = self._bars.add_task(task, total=float(total), service=name)
        if self._bars is not None:
            self._bars.update(self._tasks[key], completed=float(done), total=float(total))
        if part > self._parts.get(key, -1):
            self._parts[key] = part
            if self._bars is None or part == PARTS:
                self._say(name, f"{task}: {100 * part // PARTS} %")
        if part == PARTS:
            self._end(key)

    def drop(self, name: str) -> None:
        """End all tasks of `name`."""
        for key in [key for key in self._parts if key[0] == name]:
            self._end(key)
            del self._parts[key]

    def close(self) -> None:
        """Remove every bar and give the cursor back."""
        if self._bars is not None:
            self._bars.stop()

    def _end(self, key: tuple[str, str]) -> None:
        bar = self._tasks.pop(key, None)
        if self._bars is not None and bar is not None:
            self._bars.remove_task(bar)
            if not self._tasks:
                self._bars.stop()  # its thread redraws ten times a second
