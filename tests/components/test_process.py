import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from components.errors import BackendUnavailable, MeshError
from components.process import drain, give_up, new_instance_id, record_maker, run, stop_signal, stop_signals
from components.settings import MeshSettings
from components.startup import EX_CONFIG, WrongSettings
from engine.attention.choose_attention import AttentionUnavailable
from engine.errors import ModelUnavailable, UnsupportedModel
from tests.waiting import PATIENCE_S


class Service:
    """A service that is drained once `empty` is set."""

    def __init__(self) -> None:
        self.draining = False
        self.empty = asyncio.Event()
        self.given_up: list[str] = []
        self.obeys = True

    async def drained(self) -> None:
        await self.empty.wait()

    def stop_all(self, cause: str) -> None:
        self.given_up.append(cause)
        if self.obeys:
            self.empty.set()


def test_a_draining_service_refuses_new_requests_and_finishes_the_others() -> None:
    async def test() -> None:
        service = Service()
        states: list[bool] = []
        leaving = asyncio.create_task(drain(service, 1000, lambda: states.append(service.draining)))
        await asyncio.sleep(0)
        assert states == [True], "all are notified at once"
        assert not leaving.done()
        service.empty.set()
        await leaving
        assert not service.given_up

    asyncio.run(test())


def test_requests_that_do_not_finish_in_time_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.process.GIVE_UP_S", 0.01)

    async def test(*, obeys: bool) -> None:
        service = Service()
        service.obeys = obeys
        await asyncio.wait_for(drain(service, 0.01, lambda: None), PATIENCE_S)
        assert service.given_up == ["this instance is leaving"]

    asyncio.run(test(obeys=True))
    asyncio.run(test(obeys=False))


def test_requests_of_a_broken_engine_are_failed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers waited for a process that had ended: decode kept the pages of its transfers until their offers expired."""
    monkeypatch.setattr("components.process.GIVE_UP_S", 0.01)

    async def test(*, obeys: bool) -> None:
        service = Service()
        service.obeys = obeys
        states: list[bool] = []
        await asyncio.wait_for(give_up(service, lambda: states.append(service.draining)), PATIENCE_S)
        assert states == [True]
        assert service.given_up == ["the engine of this instance has failed"]

    asyncio.run(test(obeys=True))
    asyncio.run(test(obeys=False))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_stop(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr("components.process.end_process", lambda: left.append("ended"))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
        await asyncio.wait_for(stop_signal(), PATIENCE_S)
        left.append("cleanly")

    run(main())
    assert left == ["cleanly", "ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_a_process_waits_for_it_cancels_the_body_and_is_a_clean_stop(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setattr("components.process.end_process", lambda: left.append("ended"))

    async def main() -> None:
        async with stop_signals() as stopped:
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(1000)
                await stopped()
            finally:
                left.append("cancelled")
        await asyncio.sleep(0)  # not cancelled again
        left.append("cleanly")

    run(main())
    assert left == ["cancelled", "cleanly", "ended"]


def test_a_signal_just_after_a_process_waits_for_it_cancels_nothing() -> None:
    """A worker that was cancelled then would not drain."""

    async def test() -> None:
        async with stop_signals() as stopped:
            waiting = stopped()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
            await asyncio.wait_for(asyncio.ensure_future(waiting), PATIENCE_S)

    asyncio.run(test())


def test_a_cancellation_that_no_signal_caused_passes() -> None:
    async def test() -> None:
        async with stop_signals():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1000)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(test())


FROZEN = """
import atexit, logging, sys
from components.process import run, settle

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("taken apart")

async def main():
    global kept
    kept = Cycle()
    settle()
    logging.warning("the last line")
    print("printed", end="")

atexit.register(print, "at exit")
run(main())
"""


def test_a_process_ends_without_taking_the_interpreter_apart() -> None:
    """Each worker with triton ended with 30 lines of "nanobind: leaked"."""
    done = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout == "printed"
    assert "the last line" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        BackendUnavailable("no etcd at http://e: start one"),
        AttentionUnavailable("attention=triton needs a CUDA device, the model is on cpu"),
        ModelUnavailable("no model of that name"),
        UnsupportedModel("m is not supported"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_prevents_the_start_is_one_line(error: MeshError) -> None:
    """An error of the engine had the name of an error that `run` knows, and came as a traceback."""

    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main())
    assert str(ended.value) == error.message
    assert ended.value.code == (EX_CONFIG if isinstance(error, WrongSettings) else error.message)


def test_a_record_keeps_its_instance_and_takes_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    me = new_instance_id()
    make = record_maker(MeshSettings(namespace="ns"), "prefill", me, model="m")
    one, two = make("1"), make("2")
    assert (one.epoch, two.epoch) == ("1", "2")
    assert one.subject == two.subject == f"ns.prefill.{me}"
    assert one.pid == os.getpid()
