"""Changes of a running process by an operator."""

import asyncio
import logging
import math
from collections.abc import Iterator

import pytest

from components.errors import Rejected
from components.process_control import Limit, ProcessControl
from components.telemetry.figures import Figures
from components.telemetry.spans import tracer
from components.wire.control import Control
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, rate = logging.root.level, tracer._rate
    yield
    logging.root.setLevel(root)
    logging.getLogger(__name__).setLevel(logging.NOTSET)
    tracer._rate = rate


class Service:
    def __init__(self) -> None:
        self.draining = False
        self.stopped: list[str] = []

    async def drained(self) -> None:
        pass

    def stop_all(self, cause: str) -> None:
        self.stopped.append(cause)


class Worker:
    """A process with a service that drains in `drain_timeout_s`."""

    def __init__(self, drain_timeout_s: float = 60.0) -> None:
        self.figures = Figures("decode", "d1", traces_per_s=5.0)
        self.service, self.beats = Service(), 0
        self.figures.is_draining = lambda: self.service.draining
        self.control = ProcessControl(self.figures)
        self.control.serves(self.service, self.beat, Limit(drain_timeout_s, self.service.stop_all))

    def beat(self) -> None:
        self.beats += 1


async def test_levels_are_set_for_all_or_for_a_logger_and_a_logger_can_be_set_back() -> None:
    control, logger = Worker().control, logging.getLogger(__name__)
    assert (await control.control(Control(log_level="warning"))).log_level == "warning"
    assert not logger.isEnabledFor(logging.INFO)
    assert (await control.control(Control(log_level="debug", logger=__name__))).log_level == "debug"
    assert logger.isEnabledFor(logging.DEBUG)
    assert not logging.root.isEnabledFor(logging.INFO)
    assert (await control.control(Control(log_level="default", logger=__name__))).log_level == "warning"


async def test_each_change_is_a_line_in_the_log_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    await Worker().control.control(Control(traces_per_s=0.0))
    await Worker().control.control(Control(log_level="info", logger=__name__))
    one, two = (vars(record) for record in caplog.records if record.message == "changed by an operator")
    assert one["traces_per_s"] == 0.0
    assert "log_level" not in one
    assert (two["log_level"], two["of"]) == ("info", __name__)


async def test_the_trace_rate_is_in_force_at_once_and_shown_in_the_status() -> None:
    worker = Worker()
    assert (await worker.control.control(Control(traces_per_s=math.inf))).traces_per_s == math.inf
    assert tracer._rate is not None
    assert all(tracer._rate.take() for _ in range(100))
    assert worker.figures.status().traces_per_s == math.inf
    await worker.control.control(Control(traces_per_s=0.0))
    assert not tracer._rate.take()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Control(log_level="debug", logger=f"{__name__}x"), f"did you mean {__name__}"),
        (Control(log_level="debug", logger="no.such.thing"), "loggers have the names of modules"),
        (Control(log_level="default"), "for a logger that is named"),
        (Control(log_level="debug", traces_per_s=-1.0), "0 or more"),
        (Control(log_level="debug", traces_per_s=math.nan), "0 or more"),
    ],
)
async def test_an_invalid_change_is_refused_with_advice_and_changes_nothing(wanted: Control, message: str) -> None:
    logging.getLogger(__name__)
    worker, before = Worker(), logging.root.level
    with pytest.raises(Rejected, match=message):
        await worker.control.control(wanted)
    assert (logging.root.level, worker.figures.traces_per_s) == (before, 5.0)


async def test_a_drained_worker_keeps_running_and_can_take_work_again() -> None:
    worker = Worker()
    assert (await worker.control.control(Control(work="drain"))).draining
    assert (worker.service.draining, worker.beats) == (True, 1)
    assert not (await worker.control.control(Control(work="go-on"))).draining
    assert (worker.service.draining, worker.beats, worker.service.stopped) == (False, 2, [])


async def test_a_process_that_ends_does_not_take_work_again() -> None:
    """The operator read that it did."""
    stopped, leaving = Worker(), Worker()
    await stopped.control.control(Control(work="stop"))
    leaving.service.draining = True  # by a stop signal
    leaving.control.leave()
    for worker in (stopped, leaving):
        with pytest.raises(Rejected, match="is ending: that cannot be undone"):
            await worker.control.control(Control(work="go-on"))
    assert leaving.service.draining


async def test_requests_that_outlast_the_draining_move_to_other_instances() -> None:
    worker = Worker(drain_timeout_s=0.01)
    await worker.control.control(Control(work="drain"))
    await until(lambda: worker.service.stopped)
    assert worker.service.stopped == ["this instance is draining"]


async def test_without_a_limit_the_requests_of_a_drained_process_all_finish() -> None:
    worker = Worker()
    worker.control.serves(worker.service)
    assert (await worker.control.control(Control(work="drain"))).draining
    assert worker.control._timer is None
    assert not (await worker.control.control(Control(work="go-on"))).draining


async def test_a_stop_ends_the_process_also_one_that_does_not_drain() -> None:
    control = ProcessControl(Figures("planner", "p1"), "it holds no requests")
    with pytest.raises(Rejected, match="this planner does not drain: it holds no requests"):
        await control.control(Control(work="drain"))
    assert (await control.control(Control(work="stop"))).draining
    async with asyncio.timeout(PATIENCE_S):
        await control.stopped()
