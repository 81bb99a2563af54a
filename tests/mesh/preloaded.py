"""Service processes as forks of one that has imported their modules: a start takes 0.2 s of a core, not seconds.

A fork runs `python -m <module>` in an environment of its own. Tests of the start itself run the command.
"""

import ctypes
import gc
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Final, Self

import components.process
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[2]
MAINS: Final = tuple(f"services.{role}.__main__" for role in ("bootstrap", "prefill", "decode", "frontend"))
MOCK: Final = (*MAINS, "components.kv_transfer.nixl_transfer", "engine.mock.mock_engine")
TORCH: Final = (
    *MAINS,
    "components.kv_transfer.nixl_transfer",
    "engine.build",
    "transformers.models.llama.modeling_llama",
)
PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.005


class Fork:
    """A child process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = Lock()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it lives."""
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """Processes that fork, one for each set of modules. Leaving it ends them, but not their forks."""

    def __init__(self) -> None:
        self._parents: dict[Sequence[str], subprocess.Popen[str]] = {}
        self._lock = Lock()

    def start(self, modules: Sequence[str], module: str, env: Mapping[str, str], log: Path) -> Fork:
        """Run `module` in a fork of a process that has imported `modules`."""
        with self._lock:
            parent = self._parents.get(modules) or self._parents.setdefault(modules, _parent(modules))
            assert parent.stdin is not None
            assert parent.stdout is not None
            log.touch()
            # A process that is orphaned now becomes our child: the fork, whose parent ends at once.
            set_subreaper(on=True)
            try:
                parent.stdin.write(json.dumps({"module": module, "env": dict(env), "log": str(log)}) + "\n")
                return Fork(int(parent.stdout.readline()))
            finally:
                set_subreaper(on=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parent in self._parents.values():
            parent.communicate(timeout=PATIENCE_S)


def _parent(modules: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.mesh.preloaded", *modules]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # importing numpy would start threads
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPO, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1)


def set_subreaper(*, on: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, on, 0, 0, 0) == 0


def _serve() -> str:
    """Fork for each line of stdin. Return the fork's module, in the fork."""
    for line in sys.stdin:
        if between := os.fork():
            os.waitpid(between, 0)
            os.write(1, b"\n")  # the fork's id is written, and its parent has ended
            continue
        if child := os.fork():
            os.write(1, str(child).encode())
            os._exit(0)
        request = json.loads(line)
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(request["env"])
        components.process.STARTED_UNIX_MS = time.time_ns() // 1_000_000  # type: ignore[misc]
        return str(request["module"])
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    for name in MAINS:
        del sys.modules[name]  # runpy warns of a loaded module
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has only one of its parent's threads"
    gc.collect()
    gc.freeze()
    module = _serve()
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
