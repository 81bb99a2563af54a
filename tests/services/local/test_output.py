"""The lines of many processes in one stream."""

import io
import json
import re

import pytest
from rich.console import Console
from rich.text import Text

from services.local.output import Output


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def output(shown: io.StringIO) -> Output:
    return Output(["decode-0", "frontend-0"], Console(file=shown, soft_wrap=True, highlight=False))


def line(event: str, **facts: object) -> str:
    return json.dumps({"ts": "2026-01-02T03:04:05.678", "level": "info", "logger": "x", "event": event, **facts})


def test_facts_follow_the_event_under_the_service_name(output: Output, shown: io.StringIO) -> None:
    assert output.show("decode-0", line("request finished", request_id="r1", tokens=64)) == "request finished"
    assert shown.getvalue() == "03:04:05  decode-0    request finished  request_id=r1  tokens=64\n"


@pytest.mark.parametrize(("level", "said"), [("info", ""), ("warning", "warning: "), ("error", "error: ")])
def test_without_a_terminal_a_level_from_warning_on_is_a_word(
    output: Output, shown: io.StringIO, level: str, said: str
) -> None:
    """In a file, the line of a dead worker looked like any other."""
    output.show("decode-0", line("died", level=level))
    assert shown.getvalue() == f"03:04:05  decode-0    {said}died\n"


@pytest.mark.parametrize(
    "raw", ["[1763.5] UCX ERROR [red]not markup[/]", "{not json", '{"json": "but no event"}', "[]"]
)
def test_a_line_that_is_no_json_log_is_shown_unchanged(output: Output, shown: io.StringIO, raw: str) -> None:
    assert output.show("decode-0", raw) is None
    assert shown.getvalue().endswith(f"  decode-0    {raw}\n")


def test_a_traceback_reads_like_one(output: Output, shown: io.StringIO) -> None:
    cause = {"exc_type": "OSError", "exc_value": "gone", "frames": [{"filename": "a.py", "lineno": 3, "name": "f"}]}
    outer = {"exc_type": "PeerLost", "exc_value": "no", "frames": [{"filename": "b.py", "lineno": 9, "name": "g"}]}
    output.show("decode-0", line("failed", level="error", exception=[outer, cause]))
    assert shown.getvalue().splitlines()[1:] == ["  a.py:3 in f", "OSError: gone", "  b.py:9 in g", "PeerLost: no"]


def test_progress_in_a_pipe_is_a_line_per_quarter(output: Output, shown: io.StringIO) -> None:
    for done in range(101):
        output.show("decode-0", line("progress", task="loading", done=done, total=100))
    output.show("decode-0", line("progress", task="loading", done=100, total=100))
    assert [text.split("loading: ")[1] for text in shown.getvalue().splitlines()] == [
        "0 %",
        "25 %",
        "50 %",
        "75 %",
        "100 %",
    ]


def test_what_a_task_says_in_brackets_is_said_once(output: Output, shown: io.StringIO) -> None:
    for done in range(5):
        output.show("model", line("progress", task="Converting m (once; about 30 s)", done=done, total=4))
    said = [text.split("Converting m")[1] for text in shown.getvalue().splitlines()]
    assert said == [" (once; about 30 s): 0 %", ": 25 %", ": 50 %", ": 75 %", ": 100 %"]


@pytest.mark.parametrize("model", ["smollm2-135m", "a-model-with-a-name-that-is-far-too-long-for-a-line-of-a-terminal"])
def test_the_time_of_a_bar_is_whole_at_80_columns(model: str) -> None:
    """It was cut: "0:0…"."""
    shown = io.StringIO()
    output = Output(["decode-0"], Console(file=shown, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    output.show("model", line("progress", task=f"Converting {model} (once; about 30 s)", done=3, total=10))
    output.close()
    bars = Text.from_ansi(shown.getvalue()).plain
    assert re.search(r" 30 % 0:00:0\d", bars), bars


@pytest.mark.parametrize(
    "facts", [{}, {"done": 1, "total": 0}, {"done": "x", "total": 3}, {"done": None, "total": None}]
)
def test_progress_without_sensible_numbers_is_ignored(
    output: Output, shown: io.StringIO, facts: dict[str, object]
) -> None:
    assert output.show("decode-0", line("progress", task="loading", **facts)) == "progress"
    assert shown.getvalue() == ""


def test_a_terminal_gets_bars_and_its_cursor_back() -> None:
    shown = io.StringIO()
    output = Output(["decode-0"], Console(file=shown, force_terminal=True, width=100, _environ={"TERM": "xterm"}))
    output.show("decode-0", line("progress", task="loading", done=3, total=10))
    output.show("decode-0", line("starting"))
    output.end_progress("decode-0")  # died meanwhile
    output.show("decode-0", line("progress", task="loading", done=0, total=10))
    output.show("decode-0", line("progress", task="loading", done=10, total=10))
    output.close()
    assert "loading" in shown.getvalue()
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h") == 2  # cursor hidden, shown


def test_what_a_client_wrote_forges_no_line_and_no_colour() -> None:
    """A path with an encoded newline and escape sequences was shown as a line of another process, in red."""
    forged = "/x\n12:00:00  decode-0    died\x1b[31m"
    for is_terminal in (False, True):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=is_terminal, soft_wrap=True, highlight=False, width=200)
        output = Output(["frontend-0"], console)
        output.show(
            "frontend-0", line("refused\x1b]0;title\x07", route=forged, exception=f"of\na client: {forged[2:]}")
        )
        said, *traceback = Text.from_ansi(shown.getvalue()).plain.splitlines()
        assert said == "03:04:05  frontend-0  refused\\x1b]0;title\\x07  route=/x\\n12:00:00  decode-0    died\\x1b[31m"
        assert traceback == ["of", "a client: ", "12:00:00  decode-0    died\\x1b[31m"]
        assert "\x1b[31m" not in shown.getvalue()


def test_of_a_line_that_is_no_json_log_only_colours_reach_the_terminal() -> None:
    shown = io.StringIO()
    output = Output(["decode-0"], Console(file=shown, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    output.show("decode-0", "10 %\r\x1b[32mgreen\x1b[0m \x1bc\x1b[2J\ta")
    assert "\x1b[32mgreen\x1b[0m" in shown.getvalue()
    assert Text.from_ansi(shown.getvalue()).plain.rstrip().endswith(r"  green \x1bc\x1b[2J   a")
