"""`services.local` as a process: it logs "Ready" when it is, and leaves no process behind."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from components.startup import EX_CONFIG
from services.local import state_dir
from services.local.child_process import CannotStart, tethered
from tests.conftest import RunService, ServiceProcess
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def mesh(run_service: RunService, tmp_path: Path, port: int) -> Iterator[Callable[..., ServiceProcess]]:
    """Start a mesh of fakes; at the end all their processes must have ended."""
    started: list[ServiceProcess] = []

    def start(*habits: str) -> ServiceProcess:
        started.append(run_service("tests.services.local.fake_mesh", str(tmp_path / "state"), str(port), *habits))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        until_gone(process)


def until_gone(mesh: ServiceProcess) -> None:
    wait_until(lambda: not alive(mesh), lambda: f"left behind: {alive(mesh)}\n{mesh.logged()}")


def alive(mesh: ServiceProcess) -> set[int]:
    """Return the live processes of `mesh`: services by their logs, servers by their log's directory."""
    mentioned = {int(pid) for pid in re.findall(r"(?:pid|grandchild)=(\d+)", mesh.logged())}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if not zombie and (int(entry.name) in mentioned or f"{mesh.log.parent}/state/local" in command):
            found.add(int(entry.name))
    return found


def test_ready_comes_with_a_curl_that_names_the_real_model(mesh: Callable[..., ServiceProcess], port: int) -> None:
    process = mesh("decode=progresses")
    process.wait_for_log("trace last")
    assert f"Ready: http://127.0.0.1:{port}" in process.logged()
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in process.logged()
    assert '"model": "fake-model"' in process.logged()
    assert re.search(r"services.inspect workers --state-dir \S+$", process.logged(), re.MULTILINE)
    assert re.search(r"^03:04:05  prefill-0    ready$", process.logged(), re.MULTILINE)
    told = re.findall(r"decode-0     loading: (\d+) %", process.logged())
    assert told == ["0", "25", "50", "75", "100"]
    home = process.log.parent / "state/local"
    assert json.loads((home / "running.json").read_text())["model"] == "smollm2-135m"
    private = [home / "running.json", *home.rglob("*.conf")]
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in private} == {path.name: 0o600 for path in private}


def test_inspect_says_that_it_has_no_right_to_another_namespace(
    mesh: Callable[..., ServiceProcess], run_service: RunService, tmp_path: Path
) -> None:
    """After 8 s it reported that etcd does not answer."""
    mesh().wait_for_log("Ready:")
    asked = run_service("services.inspect", "workers", "--namespace", "other", "--state-dir", str(tmp_path / "state"))
    assert asked.exit_code() == 1
    assert asked.logged() == "this user may not read namespace 'other'; the mesh that runs here is 'kvmesh'\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_stops_everything_and_the_exit_code_is_zero(
    mesh: Callable[..., ServiceProcess], number: signal.Signals
) -> None:
    process = mesh("prefill=breeds")
    process.wait_for_log("Ready:")
    assert len(alive(process)) == 7  # four services, a grandchild, two servers
    process.popen.send_signal(number)
    assert process.exit_code() == 0, process.logged()
    assert not alive(process)
    assert (process.log.parent / "state/local/running.json").read_text() == ""


def test_an_unread_stdout_stops_nothing(tmp_path: Path, port: int) -> None:
    """The supervisor blocked in a write, as did its children, and SIGTERM had no effect."""
    state = tmp_path / "state"
    command = [*tethered(), sys.executable, "-m", "tests.services.local.fake_mesh", str(state), str(port)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
    habits = ("bootstrap=shouts", "decode=shouts")
    with subprocess.Popen([*command, *habits], env=env, stdout=subprocess.PIPE, start_new_session=True) as mesh:
        try:
            wait_until(lambda: listens(port), "no frontend")
            mesh.send_signal(signal.SIGTERM)
            assert mesh.wait(PATIENCE_S) == 0
        finally:
            mesh.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_signal_before_ready_stops_what_has_started(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh()
    process.wait_for_log("etcd")
    assert process.terminate() == 0, process.logged()
    assert not alive(process)
    assert "Ready" not in process.logged()


def test_kill_9_of_the_supervisor_leaves_no_process(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh()
    process.wait_for_log("Ready:")
    os.kill(process.popen.pid, signal.SIGKILL)
    process.exit_code()
    until_gone(process)


def test_a_hanging_child_is_killed_after_the_time_out(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh("stop_timeout_s=0.5", "decode=hangs")
    process.wait_for_log("Ready:")
    started = time.monotonic()
    assert process.terminate() == 0
    assert time.monotonic() - started > 0.5
    assert "decode-0     warning: did not stop in 0.5 s: killed" in process.logged()
    assert not alive(process)


def test_a_second_interrupt_kills_at_once(mesh: Callable[..., ServiceProcess]) -> None:
    hangs = (f"{role}=hangs" for role in ("bootstrap", "prefill", "decode", "frontend"))
    process = mesh(*hangs)
    process.wait_for_log("Ready:")
    process.popen.send_signal(signal.SIGINT)
    process.wait_for_log("once more to kill")
    process.popen.send_signal(signal.SIGINT)
    assert process.exit_code() == 130
    assert not alive(process)


def test_a_child_that_never_gets_ready_ends_the_run_with_its_last_line(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh("prefill=dies-early")
    assert process.exit_code() == 1
    assert "prefill-0    Traceback of fake: no such thing" in process.logged()
    assert "prefill-0    error: died (exit code 1), restart in 0.5 s" in process.logged()
    assert (
        process.logged().splitlines()[-1].startswith("error: prefill-0 ended 3 times before it was ready (exit code 1)")
    )
    assert not alive(process)


def test_an_interrupt_while_a_failed_run_stops_hides_no_reason(mesh: Callable[..., ServiceProcess]) -> None:
    """The exit code was 0, the last line "stopped", and the workers that still drained were killed."""
    process = mesh("decode=drains", "prefill=dies-early")
    process.wait_for_log("draining")
    process.popen.send_signal(signal.SIGINT)
    assert process.exit_code() == 1
    assert process.logged().splitlines()[-1].startswith("error: prefill-0 ended 3 times before it was ready")
    assert "decode-0     drained" in process.logged()
    assert not alive(process)


def test_wrong_settings_of_a_child_end_the_run_at_once_with_its_line(mesh: Callable[..., ServiceProcess]) -> None:
    """It was started three times, and the last line only reported this."""
    process = mesh("decode=is-misconfigured")
    assert process.exit_code() == EX_CONFIG
    assert process.logged().count("decode-0     starting") == 1
    assert process.logged().splitlines()[-1] == "error: decode-0: setting flavour: no such thing"
    assert not alive(process)


def test_a_killed_server_is_started_again_at_its_address(mesh: Callable[..., ServiceProcess]) -> None:
    process = mesh()
    process.wait_for_log("Ready:")
    (etcd,) = (
        pid
        for pid in alive(process)
        if "member" not in (c := Path(f"/proc/{pid}/cmdline").read_text()) and "/etcd" in c
    )
    url = re.search(r"etcd         ready  url=(\S+)", process.logged())
    assert url is not None
    os.kill(etcd, signal.SIGKILL)
    process.wait_for_log("etcd         error: died (SIGKILL), restart in 0.5 s")
    wait_until(lambda: process.logged().count(f"etcd         ready  url={url[1]}") == 2, process.logged)
    assert process.terminate() == 0


def test_a_taken_port_is_one_line_and_starts_nothing(mesh: Callable[..., ServiceProcess], port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = mesh()
        assert process.exit_code() == 1
    assert process.logged() == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; stop the process that uses the address, or "
        "choose another with --port\n"
    )


def test_a_second_mesh_on_the_same_state_directory_is_refused(
    mesh: Callable[..., ServiceProcess], run_service: RunService, tmp_path: Path, port: int
) -> None:
    first = mesh()
    first.wait_for_log("Ready:")
    second = run_service("tests.services.local.fake_mesh", str(tmp_path / "state"), str(free_port()))
    assert second.exit_code() == 1
    assert second.logged() == (
        f"error: {tmp_path}/state is used by a running services.local (pid {first.popen.pid}, "
        f"http://127.0.0.1:{port}): stop it or choose another --state-dir\n"
    )
    assert first.terminate() == 0


def test_a_server_whose_files_cannot_be_written_is_one_line(
    mesh: Callable[..., ServiceProcess], tmp_path: Path
) -> None:
    log = tmp_path / "state/local/nats.log"
    log.mkdir(parents=True)
    process = mesh()
    assert process.exit_code() == 1
    assert process.logged().splitlines()[-1] == f"error: cannot write {log}: Is a directory; choose another --state-dir"
    assert "Traceback" not in process.logged()


def test_a_full_disk_of_the_state_directory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed write was a traceback, and closing the file another one."""

    class FullDisk(FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_dir, "FileIO", FullDisk)
    with pytest.raises(CannotStart) as caught, state_dir.own_state(tmp_path, []):
        pass
    assert caught.value.message == (
        f"cannot write {tmp_path}/local: No space left on device; free some space or choose another --state-dir"
    )


def test_a_wrong_setting_is_named(run_service: RunService, tmp_path: Path, port: int) -> None:
    process = run_service("services.local", "--log-level", "loud", "--state-dir", str(tmp_path), "--port", str(port))
    assert process.exit_code() == EX_CONFIG
    assert process.logged().startswith(
        "error: setting log_level: Input should be 'debug', 'info', 'warning' or 'error'"
    )


def test_a_model_that_does_not_exist_is_one_line(run_service: RunService, tmp_path: Path, port: int) -> None:
    process = run_service("services.local", "--model", "/no/such", "--state-dir", str(tmp_path), "--port", str(port))
    assert process.exit_code() == EX_CONFIG
    last = process.logged().splitlines()[-1]
    assert last.startswith("error: no model '/no/such': give one of smollm2-135m, a directory")
    until_gone(process)
