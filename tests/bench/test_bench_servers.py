import signal
import sys
import time
from pathlib import Path

import pytest

from bench.processes import Server, cpu_s, serving
from tests.waiting import PATIENCE_S, wait_until

PARENT_AND_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("up", flush=True)
child.wait()
"""


PRINT_SETTINGS = """
import os, time
print(sorted(name for name in os.environ if name.startswith(("OMP_", "MESH_"))), flush=True)
time.sleep(60)
"""


def pids(server: Server) -> set[int]:
    return {pid for some in server.processes().values() for pid in some}


def test_a_stopped_server_uses_no_processor_and_still_ends_with_all_that_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT_AND_CHILD]
    with serving(command, {}, tmp_path / "log", ready="up", timeout_s=PATIENCE_S) as server:
        family = pids(server)
        assert len(family) == 2
        server.signal_group(signal.SIGSTOP)
        wait_until(lambda: {Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in family} == {"T"})
        before = cpu_s(sorted(family))
        time.sleep(0.2)
        assert cpu_s(sorted(family)) == before
        server.signal_group(signal.SIGCONT)
        wait_until(lambda: cpu_s(sorted(family)) > before)
        server.signal_group(signal.SIGSTOP)
    # the child is reaped by whoever inherits it
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_a_server_that_ends_before_it_is_ready_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no port'); raise SystemExit(3)"]
    with (
        pytest.raises(SystemExit, match=r"(?s)exited with 3.*no port"),
        serving(command, {}, tmp_path / "log", ready="up", timeout_s=PATIENCE_S),
    ):
        pytest.fail("it never was ready")


def test_settings_of_the_shell_do_not_reach_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MESH_ENGINE__THREADS", "1")
    command = [sys.executable, "-c", PRINT_SETTINGS]
    with serving(command, {"MESH_MODEL": "x"}, tmp_path / "log", ready="]", timeout_s=PATIENCE_S) as server:
        assert server.logged().strip() == "['MESH_MODEL']"
