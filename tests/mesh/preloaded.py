"""Service processes as forks of one that has imported what they import: a fifth of a second of a core each, not seconds.

A fork runs `python -m <module>` from its first line on, in an environment of its own; all that it does not do again is load
libraries. Tests of the start itself run the command.
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
    """A child process that we did not start ourselves; of `subprocess.Popen`, what tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = Lock()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same, when it has ended. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """Processes that fork, one for each set of modules, started when first wanted; leaving it ends them, not their forks."""

    def __init__(self) -> None:
        self._parents: dict[Sequence[str], subprocess.Popen[str]] = {}
        self._lock = Lock()

    def start(self, modules: Sequence[str], module: str, env: Mapping[str, str], log: Path) -> Fork:
        """Run `module` where `modules` are imported already."""
        with self._lock:
            parent = self._parents.get(modules) or self._parents.setdefault(modules, _parent(modules))
            assert parent.stdin is not None
            assert parent.stdout is not None
            log.touch()
            # who is orphaned now becomes our child: its parent's fork, through which it comes
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
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's would start threads when it is imported
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPO, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1)


def set_subreaper(*, on: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, on, 0, 0, 0) == 0


def _serve() -> str:
    """Fork for each line. It returns in each fork: the module that the fork runs."""
    for line in sys.stdin:
        if between := os.fork():
            os.waitpid(between, 0)
            os.write(1, b"\n")  # the id is said, and whose child it is is settled
            continue
        if child := os.fork():
            os.write(1, str(child).encode())
            os._exit(0)
        asked = json.loads(line)
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(asked["log"], os.O_WRONLY | os.O_APPEND)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(asked["env"])
        components.process.STARTED_UNIX_MS = time.time_ns() // 1_000_000  # type: ignore[misc]
        return str(asked["module"])
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    for name in MAINS:
        del sys.modules[name]  # to be run, and not yet there
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has only one of its parent's threads"
    gc.collect()
    gc.freeze()
    module = _serve()
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
