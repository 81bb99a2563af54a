"""The output of all processes: each line with its service's name, in that service's colour."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from components.telemetry.logs import printable, printable_lines, with_level

PARTS: Final = 4
BAR_WIDTH: Final = 16  # characters
COLOURS: Final = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta", "bright_green", "bright_blue")
LEVEL_STYLES: Final = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
# uvicorn's color_message repeats the event.
NOT_FACTS: Final = frozenset({"ts", "level", "logger", "event", "exception", "color_message"})
COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")


class Output:
    def __init__(self, names: Sequence[str], console: Console) -> None:
        """Each of `names` gets a colour."""
        self._console = console
        self._styles = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        self._width = max(map(len, names), default=0)
        self._progress = ProgressLines(self._console, lambda name, text: self._line(name, Text(text), None))

    def show(self, name: str, line: str) -> str | None:
        """Show a line that `name` wrote. Returns: its event; None if it is not a JSON log."""
        facts = _parse(line)
        if facts is None:
            if line:
                self._line(name, Text.from_ansi(_visible(line)), None)
            return None
        event = str(facts["event"])
        if event == "progress":
            self._progress.update(name, printable(str(facts.get("task", ""))), facts.get("done"), facts.get("total"))
            return event
        shown = {
            k: printable(v) if isinstance(v, str) else json.dumps(v) for k, v in facts.items() if k not in NOT_FACTS
        }
        said = printable(event)
        if self._console.is_terminal:
            text = Text(said, style=LEVEL_STYLES.get(str(facts.get("level")), ""))
            for key, value in shown.items():
                text.append(f"  {key}=", style="dim").append(value)
            self._line(name, text, facts.get("ts"))
        else:  # rich takes ten times as long, which matters when many requests log a line
            pairs = "".join([f"  {key}={value}" for key, value in shown.items()])
            said = with_level(str(facts.get("level")), said)
            self._console.file.write(f"{_clock(facts.get('ts'))}  {name:<{self._width}}  {said}{pairs}\n")
            self._console.file.flush()
        if facts.get("exception"):
            self._console.print(Text(printable_lines(_traceback(facts["exception"]))))
        return event

    def report(self, name: str, event: str, *, level: str = "info", **facts: str | float | None) -> None:
        self.show(name, json.dumps({"level": level, "event": event, **facts}))

    def print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(Text(line, style="bold"))

    def error(self, message: str) -> None:
        self._console.print(Text("error: ", style="bold red").append(printable_lines(message), style="default"))

    def end_progress(self, name: str) -> None:
        self._progress.drop(name)

    def close(self) -> None:
        self._progress.close()

    def _line(self, name: str, text: Text, ts: object) -> None:
        label = (f"{name:<{self._width}}", self._styles.get(name, "bold"))
        self._console.print(Text.assemble((_clock(ts), "dim"), "  ", label, "  ", text))


class ProgressLines:
    """Progress bars on a terminal; elsewhere a line at the start, at each quarter and at the end."""

    def __init__(self, console: Console, print_line: Callable[[str, str], None]) -> None:
        self._print = print_line
        self._bars = (
            Progress(
                # The only column that rich may shrink: a long text takes a second line.
                TextColumn("{task.fields[service]}  {task.description}", table_column=Column()),
                BarColumn(BAR_WIDTH),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._parts: dict[tuple[str, str], int] = {}  # of PARTS, the last one shown

    def update(self, name: str, task: str, done: object, total: object) -> None:
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
                shown = task if part == 0 else task.partition(" (")[0]  # details in brackets are shown once
                self._print(name, f"{shown}: {100 * part // PARTS} %")
        if part == PARTS:
            self._end(key)

    def drop(self, name: str) -> None:
        for key in [key for key in self._parts if key[0] == name]:
            self._end(key)
            del self._parts[key]

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _end(self, key: tuple[str, str]) -> None:
        bar = self._tasks.pop(key, None)
        if self._bars is not None and bar is not None:
            self._bars.remove_task(bar)
            if not self._tasks:
                self._bars.stop()  # its thread redraws ten times a second


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "event" in facts else None


def _visible(line: str) -> str:
    """What a terminal would show of a line that is not a JSON log: its colours, and the text after a carriage return."""
    parts = COLOUR.split(line.rpartition("\r")[2].expandtabs())
    return "".join([part if at % 2 else printable(part) for at, part in enumerate(parts)])


def _traceback(exception: object) -> str:
    """`exception` is a string, or structlog's list of exceptions, the latest first."""
    if not isinstance(exception, list):
        return str(exception)
    lines = []
    for raised in reversed(exception):
        lines += [f"  {frame['filename']}:{frame['lineno']} in {frame['name']}" for frame in raised.get("frames", [])]
        lines.append(f"{raised.get('exc_type')}: {raised.get('exc_value')}")
    return "\n".join(lines)


def _clock(ts: object) -> str:
    try:
        when = datetime.fromisoformat(str(ts))
    except ValueError:
        when = datetime.now().astimezone()
    return f"{when.astimezone():%H:%M:%S}"
