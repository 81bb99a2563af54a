"""Every log line of a request has its ids, from any logger."""

import asyncio
import io
import json
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider

from components.telemetry.logs import RequestIds, configure_logs, request_id
from components.telemetry.repeated_lines import BURST, CountingHandler

ours, library = logging.getLogger("components.test"), logging.getLogger("a_library")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextmanager
def of_request(name: str) -> Generator[None, None, None]:
    token = request_id.set(name)
    try:
        yield
    finally:
        request_id.reset(token)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_lines_of_a_request_have_its_id_and_others_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    ours.info("before")
    with of_request("r1"):
        ours.info("inside")
        library.warning("also inside")
        ours.info("of another", extra={"request_id": "r2"})
    ours.info("after")
    assert [line.get("request_id") for line in lines(capsys)] == [None, "r1", "r1", "r2", None]


def test_a_traced_request_has_its_trace_id_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("root") as span:
        ours.info("inside")
    ours.info("after")
    inside, after = lines(capsys)
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert "trace_id" not in after


def test_tasks_carry_the_id_on_and_requests_side_by_side_keep_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "json")

    async def child(name: str) -> None:
        await asyncio.sleep(0)
        ours.info("child", extra={"of": name})

    async def serve(name: str) -> None:
        with of_request(name):
            await asyncio.create_task(child(name))

    async def main() -> None:
        await asyncio.gather(*(serve(f"r{i}") for i in range(4)))

    asyncio.run(main())
    found = lines(capsys)
    assert len(found) == 4
    assert all(line["request_id"] == line["of"] for line in found)


def test_a_line_that_is_held_back_keeps_the_id_of_its_request() -> None:
    """Another thread writes it."""
    stream, now_s = io.StringIO(), 0.0
    handler = CountingHandler(stream, lambda: now_s)
    handler.setFormatter(logging.Formatter("%(message)s %(request_id)s"))
    handler.addFilter(RequestIds())
    for number in range(BURST + 2):
        with of_request(f"r{number}"):
            handler.handle(ours.makeRecord(ours.name, logging.INFO, "f", 1, "refused", (), None))
    now_s = 100.0
    handler.sweep()
    assert stream.getvalue().splitlines()[-1] == f"refused r{BURST + 1}"
