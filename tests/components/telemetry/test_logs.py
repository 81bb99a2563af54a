import json
import logging
import re
from collections.abc import Iterator

import pytest

from components.telemetry.logs import ProgressLog, configure_logs, log_progress

log = logging.getLogger("components.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {n: logging.getLogger(n).level for n in list(root.manager.loggerDict)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_one_object_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    log.info("ready", extra={"instance": "i"})
    log_progress("load", 1, 3)
    one, two = lines(capsys)
    assert {"event": "ready", "instance": "i", "level": "info", "logger": "components.test"}.items() <= one.items()
    assert isinstance(one["ts"], str)
    assert {"event": "progress", "task": "load", "done": 1, "total": 3}.items() <= two.items()


def test_progress_is_logged_at_its_ends_and_twice_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    now = 0.0
    told = ProgressLog(lambda: now)
    for done in range(273):
        told("load", done, 272)
        told("compile", min(done, 1), 1)
        now = 0.01 * done
    assert [line["done"] for line in lines(capsys) if line["task"] == "load"] == [0, 51, 101, 151, 201, 251, 272]


def test_a_traceback_does_not_show_what_the_variables_held(capsys: pytest.CaptureFixture[str]) -> None:
    """They may be prompts."""
    configure_logs("info", "json")
    try:
        prompt = "my secret"
        raise ZeroDivisionError(len(prompt))
    except ZeroDivisionError:
        log.exception("request failed")
    [line] = lines(capsys)
    assert "ZeroDivisionError" in json.dumps(line["exception"])
    assert "my secret" not in json.dumps(line)


def test_quieter_levels_and_noisy_libraries_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    log.debug("state")
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("nats").info("chatter")
    logging.getLogger("torch.utils.cpp_extension").warning(
        "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'"
    )
    assert lines(capsys) == []


def test_a_person_reads_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("debug", "console")
    log.debug("state", extra={"was": "open"})
    text = capsys.readouterr().err
    assert re.fullmatch(r"\d\d:\d\d:\d\d  state  was=open\n", text)
    log.warning("slow", extra={"steps": 3})
    assert capsys.readouterr().err[10:] == "warning: slow  steps=3\n"
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        log.exception("failed")
    assert capsys.readouterr().err.splitlines()[-1] == "ZeroDivisionError: why"


def test_what_a_client_wrote_forges_no_line_and_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    """The path of a refused request was written unescaped."""
    configure_logs("info", "console")
    log.info("refused\rx", extra={"route": "/x\n12:00:00  ready\x1b[31m\x9b1m\u2028"})
    assert capsys.readouterr().err[10:] == "refused\\rx  route=/x\\n12:00:00  ready\\x1b[31m\\x9b1m\\u2028\n"
    try:
        raise ValueError("of a client: \x1b[2J")
    except ValueError:
        log.exception("failed")
    assert capsys.readouterr().err.splitlines()[-1] == "ValueError: of a client: \\x1b[2J"
