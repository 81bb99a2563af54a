"""Server processes of a benchmark and their CPU time."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from services.local.child_process import tethered
from services.local.free_ports import free_ports
from services.local.shared_memory import SharedMemoryFiles

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
CPU_FIELDS: Final = slice(11, 13)  # utime and stime in /proc/<pid>/stat, counted from the state
STOP_TIMEOUT_S: Final = 60.0
MESH_HOME: Final = Path("~/.cache/kvmesh").expanduser()
# Variables that are removed, so that figures do not depend on the shell's settings.
NOT_INHERITED: Final = ("MESH_", "VLLM_", "DYN_", "OMP_", "KMP_", "TORCHINDUCTOR_")


@dataclass(frozen=True, slots=True)
class Server:
    """A server process, which leads its own process group."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> dict[str, list[int]]:
        """Return the pids of the process and its descendants, by service or executable."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        family = {self.popen.pid}
        while grown := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= grown
        found: dict[str, list[int]] = {}
        for pid in family & parents.keys():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            names = [w.removeprefix("services.") for w in words if w.startswith("services.")]
            found.setdefault(names[0] if names else Path(words[0]).name, []).append(pid)
        return found

    def signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def cpu_s(pids: Sequence[int]) -> float:
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(sum(map(int, stat[CPU_FIELDS])) for stat in stats) * TICK_S


def machine_busy_s() -> float:
    """Return the CPU time of all processes of this machine, including time stolen by its host."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) * TICK_S


@contextmanager
def serving(
    command: Sequence[str], env: Mapping[str, str], log: Path, *, ready: str, timeout_s: float
) -> Iterator[Server]:
    """Start `command` and wait for its `ready` line. It ends with this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    with log.open("wb") as stream:
        popen = subprocess.Popen(
            [*tethered(), *command],
            env={**inherited, **env},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    server = Server(popen, log)
    try:
        deadline = time.monotonic() + timeout_s
        while ready not in server.logged():
            if popen.poll() is not None:
                sys.exit(f"the server exited with {popen.returncode}: {' '.join(command)}\n{server.logged()}")
            if time.monotonic() > deadline:
                sys.exit(f"the server was not ready after {timeout_s:g} s: {' '.join(command)}\n{server.logged()}")
            time.sleep(0.2)
        yield server
    finally:
        shared_memory, family = SharedMemoryFiles(), [pid for pids in server.processes().values() for pid in pids]
        for pid in family:
            shared_memory.remember(pid)
        server.signal_group(signal.SIGCONT)  # SIGTERM does not reach a stopped process
        popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_TIMEOUT_S)
        server.signal_group(signal.SIGKILL)
        popen.wait()
        for pid in family:  # remove the files of killed processes
            shared_memory.remove_files_of(pid)


@contextmanager
def mesh(
    model: str, counts: Mapping[str, int], env: Mapping[str, str], port: int, timeout_s: float = 120.0
) -> Iterator[Server]:
    """Run `services.local` with its own state directory, but with shared converted and compiled models."""
    with tempfile.TemporaryDirectory() as home:
        for name in ("models", "compile"):
            (MESH_HOME / name).mkdir(parents=True, exist_ok=True)
            (Path(home) / name).symlink_to(MESH_HOME / name)
        arguments = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
        command = [sys.executable, "-m", "services.local", "--model", model, "--port", str(port), *arguments]
        with serving(
            command, {"MESH_STATE_DIR": home, **env}, Path(home) / "log", ready="Ready:", timeout_s=timeout_s
        ) as server:
            yield server


def model_name(port: int, timeout_s: float = 30.0) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        with urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            models = json.load(answer)["data"]
        if models:
            return str(models[0]["id"])
        if time.monotonic() > deadline:
            sys.exit(f"the endpoint at port {port} had no model after {timeout_s:g} s")
        time.sleep(0.1)


def free_port() -> int:
    return free_ports(1)[0]
