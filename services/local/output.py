"""One stream for all processes: each line under its service's name, in that service's colour."""

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from services.local.progress import ProgressLines

COLOURS: Final = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta", "bright_green", "bright_blue")
LEVEL_STYLES: Final = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
# color_message: uvicorn's event again.
NOT_FACTS: Final = frozenset({"ts", "level", "logger", "event", "exception", "color_message"})


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on in silence: whoever read has left, the services have not."""
        self.file = open(os.devnull, "w")  # noqa: PTH123, SIM115  # until the process ends


class Output:
    """Where everything is shown. `names` get a colour each, in order; other names have none."""

    def __init__(self, names: Sequence[str] = (), console: Console | None = None) -> None:
        self._console = console or _Console(highlight=False, soft_wrap=True)
        self._styles = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
        self._width = max(map(len, names), default=0)
        self._progress = ProgressLines(self._console, lambda name, text: self._line(name, Text(text), None))

    def show(self, name: str, line: str) -> str | None:
        """Show a line that `name` wrote. Returns: its event, or None when it is not one of our JSON lines."""
        facts = _parse(line)
        if facts is None:
            if line:
                self._line(name, Text.from_ansi(line), None)
            return None
        event = str(facts["event"])
        if event == "progress":
            self._progress.update(name, str(facts.get("task", "")), facts.get("done"), facts.get("total"))
            return event
        text = Text(event, style=LEVEL_STYLES.get(str(facts.get("level")), ""))
        for key, value in facts.items():
            if key not in NOT_FACTS:
                text.append(f"  {key}=", style="dim").append(value if isinstance(value, str) else json.dumps(value))
        self._line(name, text, facts.get("ts"))
        if facts.get("exception"):
            self._console.print(Text(_traceback(facts["exception"])))
        return event

    def say(self, name: str, event: str, *, level: str = "info", **facts: str | float | None) -> None:
        """Show what we ourselves have to say about `name`."""
        self.show(name, json.dumps({"level": level, "event": event, **facts}))

    def print(self, *lines: str) -> None:
        """Lines of nobody's, as they are, meant to be read or pasted."""
        for line in lines:
            self._console.print(Text(line, style="bold"))

    def error(self, message: str) -> None:
        """Why the run ends, for whoever reads only the last line."""
        self._console.print(Text("error: ", style="bold red").append(message, style="default"))

    def end_progress(self, name: str) -> None:
        """`name` is gone: so are its bars."""
        self._progress.drop(name)

    def close(self) -> None:
        """Give the terminal back."""
        self._progress.close()

    def _line(self, name: str, text: Text, ts: object) -> None:
        label = (f"{name:<{self._width}}", self._styles.get(name, "bold"))
        self._console.print(Text.assemble((_clock(ts), "dim"), "  ", label, "  ", text))


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "event" in facts else None


def _traceback(exception: object) -> str:
    """Text of a log line's `exception`: text already, or structlog's list of exceptions with frames, the last one first."""
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
