"""Children die, hang, and leave processes and files; the supervisor logs it, restarts them and cleans up."""

import asyncio
import errno
import io
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from services.local import child_process, children
from services.local.child_process import run
from services.local.children import Child, ChildSpec, RestartDelays, Supervision, running_children
from services.local.lossy_stdout import LossyFile
from services.local.output import Output
from services.local.shared_memory import SharedMemoryFiles
from services.local.supervisor import _stop_signals
from tests import waiting
from tests.waiting import PATIENCE_S

FAKE = str(Path(__file__).with_name("fake_service.py"))


def supervise(
    *habits: str, scenario: Callable[[Child, Callable[[str], Awaitable[re.Match[str]]]], Awaitable[None]]
) -> str:
    """Run `scenario` beside one fake child. Return the output."""
    shown = io.StringIO()

    async def until(pattern: str) -> re.Match[str]:
        await waiting.until(lambda: re.search(pattern, shown.getvalue()), lambda: f"{pattern} in\n{shown.getvalue()}")
        found, *_ = re.finditer(pattern, shown.getvalue())
        return found

    async def main() -> None:
        supervision = Supervision(Output(["fake-0"], Console(file=shown, width=200)), stop_timeout_s=0.3)
        spec = ChildSpec("fake-0", [sys.executable, FAKE, *habits], {})
        async with asyncio.timeout(PATIENCE_S), running_children([spec], supervision) as (child,):
            await scenario(child, until)

    asyncio.run(main())
    return shown.getvalue()


def test_backoff_doubles_to_its_limit_and_starts_over_after_a_long_life() -> None:
    delays = RestartDelays()
    assert [delays.after(1.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert delays.after(30.0) == 0.5


def test_a_killed_process_that_is_not_gone_in_time_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ended in a traceback while the kernel freed a large pool."""

    async def scenario() -> None:
        process = await child_process.spawn([sys.executable, FAKE, "hangs"], output=asyncio.subprocess.DEVNULL)
        monkeypatch.setattr(child_process, "KILL_WAIT_S", 0.0)
        wait = process.wait
        monkeypatch.setattr(process, "wait", lambda: asyncio.sleep(PATIENCE_S))
        assert not await child_process.stop(process, 0.0)
        assert await wait() < 0, "a signal ended it"

    asyncio.run(scenario())


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    async def inside() -> list[bool]:
        supervision = Supervision(Output([], Console(file=io.StringIO())), stop_timeout_s=1.0)
        serving = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
        with _stop_signals(serving, supervision):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            ignored = serving.cancelling() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait({serving})
        return [ignored, serving.cancelled()]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(inside()) == [True, True]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_child_is_restarted_and_its_signal_reported() -> None:
    async def scenario(child: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until("ready")
        os.kill(int((await until(r"pid=(\d+)"))[1]), signal.SIGKILL)
        await until(r"died \(SIGKILL\), restart in 0.5 s  restarts=1")
        assert not child.ready.is_set()
        await until(r"(?s)died.*ready")
        assert child.ready.is_set()

    supervise(scenario=scenario)


def test_a_child_that_was_asked_to_end_did_not_die() -> None:
    """After `inspect drain --stop` the log had an error: died (exit code 0)."""

    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until("ready")
        os.kill(int((await until(r"pid=(\d+)"))[1]), signal.SIGTERM)
        await until(r"  ended, starting again in 0.5 s  restarts=1")
        await until(r"(?s)ended.*ready")

    assert "error" not in supervise(scenario=scenario)


def test_a_child_that_keeps_dying_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.05)

    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until(r"restart in 0.2 s")

    shown = supervise("dies", scenario=scenario)
    assert re.findall(r"died \(exit code 3\), restart in (\S+) s", shown) == ["0.05", "0.1", "0.2"]


def test_a_child_that_waits_for_its_restart_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until("restart in")

    monkeypatch.setattr(children, "FIRST_DELAY_S", 1000.0)
    supervise("dies", scenario=scenario)


def test_stopping_a_child_that_is_just_being_started_leaves_nothing() -> None:
    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await asyncio.sleep(0)

    supervise("hangs", scenario=scenario)  # the conftest counts processes at the end


def test_what_a_dead_child_started_dies_with_it() -> None:
    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        grandchild = int((await until(r"grandchild=(\d+)"))[1])
        await until("ready")
        assert waiting.is_alive(grandchild)
        os.kill(int((await until(r"pid=(\d+)"))[1]), signal.SIGKILL)
        await until("died")
        await waiting.until(lambda: not waiting.is_alive(grandchild))  # it has been killed, but may not have ended

    supervise("breeds", scenario=scenario)


def test_a_hanging_child_is_killed_and_its_shared_memory_removed() -> None:
    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until("ready")

    shown = supervise("hangs", "leaves-shm", scenario=scenario)
    file = re.search(r"file=(\S+)", shown)
    assert file is not None
    assert not Path(file[1]).exists()
    assert "did not stop in 0.3 s: killed" in shown


def test_a_child_for_which_there_is_no_process_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole mesh ended with a traceback if the kernel refused a process at a restart.

    Another process may have the id of the one before by then: its folders stay.
    """
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spawn = child_process.spawn
    pids: list[int] = []

    async def refused(*_: object, **__: object) -> Process:
        monkeypatch.setattr(child_process, "spawn", spawn)
        (tmp_path / f"kvmesh-ranks-{pids[0]}-of-another").mkdir()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        pids.append(int((await until(r"pid=(\d+)"))[1]))
        await until("ready")
        monkeypatch.setattr(child_process, "spawn", refused)
        os.kill(pids[0], signal.SIGKILL)
        await until("Resource temporarily unavailable")
        await until(r"(?s)ready.*died.*died \(exit code 71\).*ready")
        assert list(tmp_path.iterdir()) == [tmp_path / f"kvmesh-ranks-{pids[0]}-of-another"]

    supervise(scenario=scenario)


@pytest.mark.parametrize("habit", ["hangs", "dies-early"])
def test_a_temporary_folder_of_a_child_ends_with_it(habit: str) -> None:
    """Ranks of a worker remove its folder after its death, but are killed with it."""

    async def scenario(_: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        folder = (await until(r"folder=(\S+)"))[1]
        if habit == "dies-early":
            await until("died")
            assert not Path(folder).exists(), "before the next start"

    shown = supervise(habit, "leaves-folder", scenario=scenario)
    folders = re.findall(r"folder=(\S+)", shown)
    assert folders
    assert not any(Path(folder).exists() for folder in folders)


def test_shared_memory_that_a_live_process_maps_is_kept(tmp_path: Path) -> None:
    files = SharedMemoryFiles()
    kept: list[bool] = []

    def show(line: str) -> None:
        facts = json.loads(line)
        if facts["event"] == "mapped":
            files.remember(pid[0])
            files.remember(os.getpid())  # maps nothing there
            kept.append(files.remove_files_of(os.getpid()) == [] and Path(facts["file"]).exists())
            kept.append(files.remove_files_of(pid[0]) == [] and Path(facts["file"]).exists())  # it lives
            os.kill(pid[0], signal.SIGKILL)

    pid: list[int] = []
    command = [sys.executable, FAKE, "leaves-shm"]
    assert asyncio.run(run(command, show, started=lambda process: pid.append(process.pid))) == -signal.SIGKILL
    assert kept == [True, True]
    assert files.remove_files_of(pid[0]) == [f"/dev/shm/kvmesh-test-{pid[0]}"]


def test_wrong_settings_at_a_restart_end_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A typo in a file of one child stopped all processes at its next restart."""
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.05)
    flaw = tmp_path / "flaw"

    async def scenario(child: Child, until: Callable[[str], Awaitable[re.Match[str]]]) -> None:
        await until("ready")
        flaw.touch()
        assert child.kill()
        await until(r"setting flavour: no such thing\n.*died \(exit code 78: wrong settings\), restart in 0.1 s")
        await until(r"restart in 0.2 s")
        flaw.unlink()
        await until(r"(?s)wrong settings.*ready")

    supervise(f"is-misconfigured-by={flaw}", scenario=scenario)


def test_a_line_longer_than_the_limit_does_not_stop_the_reading() -> None:
    lines: list[str] = []
    program = "print('x' * 3_000_000); print('after')"
    assert asyncio.run(run([sys.executable, "-c", program], lines.append)) == 0
    assert "(a line too long to show)" in lines
    assert lines[-1] == "after"


def test_a_line_that_cannot_be_shown_does_not_stop_the_reading_of_a_child(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the reading, and the child blocked on a full pipe."""
    shown: list[str] = []

    def show(line: str) -> None:
        if not shown and line == "0":
            raise UnicodeError
        shown.append(line)

    async def main() -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await run([sys.executable, "-c", "for i in range(40000): print(i)"], show)

    assert asyncio.run(main()) == 0
    assert shown == [str(number) for number in range(1, 40000)]
    assert caplog.messages == ["cannot show a line of a child"]


@pytest.mark.parametrize("place", ["/dev/full", "pipe"])
def test_output_that_is_not_taken_does_not_stop_the_reading_of_a_child(place: str) -> None:
    """A full disk ended the reading, and a pipe that no process reads (`| less`) blocked the whole supervisor."""
    code = 'for i in range(4000): print(\'{"event": "line", "pad": "%s"}\' % (\'x\' * 1000))'
    read_end, write_end = os.pipe() if place == "pipe" else (os.open(place, os.O_RDONLY), os.open(place, os.O_WRONLY))

    async def main() -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await run([sys.executable, "-c", code], lambda line: output.show("child", line))

    file = LossyFile(write_end)
    try:
        output = Output(["child"], Console(file=file, soft_wrap=True))
        assert asyncio.run(main()) == 0
    finally:
        os.close(read_end)
        file.close()
        os.close(write_end)


def test_a_command_that_does_not_exist_is_named() -> None:
    lines: list[str] = []
    assert asyncio.run(run(["/no/such/program"], lines.append)) == 1
    assert lines == ["/no/such/program: No such file or directory"]
