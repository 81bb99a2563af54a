"""Equal log lines are counted, not repeated."""

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from components.telemetry.logs import configure_logs, log_progress, log_ready
from components.telemetry.repeated_lines import BURST, MAX_WINDOWS, WINDOW_S, CountingHandler, requests
from tests.waiting import wait_until

log = logging.getLogger("components.counted")


class Lines:
    """The output of a handler, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.handler = CountingHandler(self.stream, lambda: self.now_s)
        self.handler.setFormatter(_Facts())

    def take(self) -> list[tuple[str, object, object]]:
        """Return message, `n` and `repeated` of each line since the last call."""
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return [tuple(json.loads(line)) for line in text.splitlines()]


class _Facts(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps([record.getMessage(), getattr(record, "n", None), getattr(record, "repeated", None)])


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    made = Lines()
    monkeypatch.setattr(log, "handlers", [made.handler])
    monkeypatch.setattr(log, "propagate", False)
    log.setLevel(logging.DEBUG)
    return made


def test_of_equal_lines_a_few_are_written_and_the_rest_counted(lines: Lines) -> None:
    """3,282 refused requests in two seconds logged a line each."""
    for n in range(3282):
        log.info("call refused", extra={"n": n})
    assert lines.take() == [("call refused", n, None) for n in range(BURST)]
    lines.now_s = WINDOW_S
    lines.handler.sweep()
    assert lines.take() == [("call refused", 3281, 3282 - BURST)]
    lines.handler.sweep()
    log.info("call refused", extra={"n": 1})
    assert lines.take() == [("call refused", 1, None)], "a new window"


def test_a_window_without_held_lines_ends_in_silence(lines: Lines) -> None:
    log.info("lease lost")
    lines.now_s = WINDOW_S
    lines.handler.sweep()
    assert lines.take() == [("lease lost", None, None)]


def test_the_next_equal_line_ends_a_window_too(lines: Lines) -> None:
    for n in range(BURST + 2):
        log.info("call refused", extra={"n": n})
    lines.take()
    lines.now_s = WINDOW_S + 1
    log.info("call refused", extra={"n": 100})
    assert lines.take() == [("call refused", BURST + 1, 2), ("call refused", 100, None)]


def test_lines_of_another_message_level_or_logger_are_others(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    other = logging.getLogger("components.counted.other")
    for _ in range(BURST):
        log.info("one")
        log.info("two")
        log.warning("one")
        other.info("one")
    assert len(lines.take()) == 4 * BURST


def test_lines_of_a_library_are_equal_if_they_come_from_one_place(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries put facts into their messages: a thousand lines of one broken peer were written."""
    library = logging.getLogger("a_library")
    monkeypatch.setattr(library, "handlers", [lines.handler])
    monkeypatch.setattr(library, "propagate", False)
    for n in range(BURST + 3):
        library.warning(f"connection {n} is broken")
    assert len(lines.take()) == BURST
    library.warning("another place")
    assert lines.take() == [("another place", None, None)]
    lines.now_s = WINDOW_S
    lines.handler.sweep()
    assert lines.take() == [(f"connection {BURST + 2} is broken", None, 3)]


def test_the_line_at_the_end_of_a_request_is_always_written(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "handlers", [lines.handler])
    monkeypatch.setattr(requests, "propagate", False)
    requests.setLevel(logging.INFO)
    for n in range(3 * BURST):
        requests.info("request", extra={"n": n})
    assert lines.take() == []  # held back briefly, or until the next line
    log.info("next")
    assert lines.take() == [*(("request", n, None) for n in range(3 * BURST)), ("next", None, None)]


def test_gathered_lines_are_written_soon_and_at_the_end(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "handlers", [lines.handler])
    monkeypatch.setattr(requests, "propagate", False)
    requests.setLevel(logging.INFO)
    requests.info("request", extra={"n": 1})
    wait_until(lines.stream.getvalue)
    assert lines.take() == [("request", 1, None)]
    requests.info("request", extra={"n": 2})
    requests.warning("request", extra={"n": 3})  # slow or failed: at once, and in order
    requests.info("request", extra={"n": 4})
    lines.handler.close()
    assert lines.take() == [("request", n, None) for n in (2, 3, 4)]


def test_debug_lines_are_all_written(lines: Lines) -> None:
    for _ in range(3 * BURST):
        log.debug("state")
    assert len(lines.take()) == 3 * BURST


def _one() -> None:
    raise ZeroDivisionError


def _two() -> None:
    raise KeyError


def test_a_traceback_is_counted_with_its_like_and_a_new_one_is_written(lines: Lines) -> None:
    def fail(how: Callable[[], None]) -> None:
        try:
            how()
        except Exception:
            log.exception("request failed")

    for _ in range(2 * BURST):
        fail(_one)
    assert len(lines.take()) == BURST
    fail(_two)
    assert len(lines.take()) == 1


def test_a_line_that_is_held_back_is_logged_without_another_line() -> None:
    stream = io.StringIO()
    handler = CountingHandler(stream, window_s=0.05)
    handler.setFormatter(_Facts())
    for _ in range(BURST + 3):
        handler.handle(log.makeRecord(log.name, logging.INFO, "f", 1, "refused", (), None))
    wait_until(lambda: len(stream.getvalue().splitlines()) > BURST)
    assert json.loads(stream.getvalue().splitlines()[-1]) == ["refused", None, 3]


def test_messages_that_are_all_unlike_take_bounded_memory(lines: Lines) -> None:
    for n in range(3 * MAX_WINDOWS):
        log.info(f"message {n}")
    assert len(lines.take()) == 3 * MAX_WINDOWS
    assert len(lines.handler._windows) <= MAX_WINDOWS


def test_threads_lose_no_line(lines: Lines) -> None:
    def refuse() -> None:
        for _ in range(500):
            log.info("refused")

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.handler.sweep(all_of_them=True)
    assert lines.take()[BURST:] == [("refused", None, 2000 - BURST)]


def test_what_a_supervisor_waits_for_is_always_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    for done in range(0, 20, 2):
        log_progress("load", done and 10, 10)
        log_ready(instance="i")
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert events == ["progress", "ready"] * 10


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_process_that_ends_logs_the_lines_it_held_back(fmt: str) -> None:
    code = f"""
import logging
from components.telemetry.logs import configure_logs
configure_logs("info", {fmt!r})
for n in range(100):
    logging.getLogger("x").info("call refused", extra={{"call": n}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = done.stderr.splitlines()
    assert len(written) == BURST + 1
    if fmt == "json":
        last = json.loads(written[-1])
        assert (last["event"], last["call"], last["repeated"]) == ("call refused", 99, 100 - BURST)
    else:
        assert "call refused" in written[-1]
        assert f"repeated={100 - BURST}" in written[-1]
