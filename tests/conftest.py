"""Fixtures of all tests: a real etcd and a real NATS for the run, namespaces, and processes that are stopped."""

import tests.device  # noqa: F401  # before torch: it chooses how Triton runs kernels

# isort: split
import asyncio
import gc
import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import settings as hypothesis_settings
from xdist.scheduler import LoadFileScheduling

from components.process import GC_THRESHOLDS
from engine.model.resolve import model_dir
from services.local.child_process import tethered
from services.local.servers import ETCD, NATS, Kind, running
from tests.device import choose_device, is_on_device
from tests.mesh.preloaded import Preloaded
from tests.secured import SECURED, secured
from tests.waiting import PATIENCE_S, wait_until

# With several test processes each computes on one core: their threads would wait for each other at every barrier.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis_settings.register_profile("fuzz", max_examples=3_000, deadline=None)  # make fuzz
hypothesis_settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
if hypothesis_settings.get_current_profile_name() == "default":
    hypothesis_settings.load_profile("untimed")

REPO: Final = Path(__file__).resolve().parents[1]
OVER_REAL_MESH: Final = frozenset(
    f"tests/mesh/test_{name}.py" for name in ("answers_as_asked", "documented_requests", "http", "tokens", "tools_mesh")
)
SHORT: Final = "tests/services/frontend/"  # many files, none of which takes long
ENDS_BY_ITSELF: Final = re.compile(r"multiprocessing[. ]resource_tracker|torch/_inductor/compile_worker")
_counter: Final = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="with -m gpu: cuda:N; cpu or simulated: the same tests without a GPU [cuda:0]")
    parser.addoption("--graphs", action="store_true", help="with -m gpu: decodes of engines run from CUDA graphs")


def pytest_configure(config: pytest.Config) -> None:
    choose_device(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run by a script with `&`; what we start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Files(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "real mesh" if file in OVER_REAL_MESH else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give a file to one process, and all files over the real mesh, which takes 15 s of a core to start."""
    return _Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_on_device, items):
        item.add_marker(pytest.mark.gpu)
    # last, so that the processes which share the files end at nearly the same time
    items.sort(key=lambda item: item.nodeid.startswith(SHORT))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and later as rarely as in services.

    Modules and tests live to the end: scanning them repeatedly takes a quarter of the run's CPU time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def left_by_earlier_modules_is_not_scanned() -> None:
    """Freeze objects of earlier modules: some tests make hundreds of full collections."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: a time stamp in them would give each process other test names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) and not val.isascii() else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the run if a process of a test outlives it."""
    before = descendants(os.getpid())
    yield
    left = [
        line
        for pid in descendants(os.getpid()) - before
        if (line := _command_line(pid)) and not ENDS_BY_ITSELF.search(line)
    ]
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """Load certificates once instead of for each HTTP client, which takes 40 ms. Newer packages of OpenAI and Anthropic use
    httpx2.
    """
    with ExitStack() as patches:
        for client in [import_module(name) for name in ("httpx", "httpx2") if find_spec(name)]:
            once = cache(client.create_ssl_context)
            patches.enter_context(mock.patch.object(client._transports.default, "create_ssl_context", once))
        yield


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory, nothing_left_behind: None) -> Iterator[Callable[[Kind], str]]:
    home = tmp_path_factory.mktemp("servers")
    with asyncio.Runner() as runner:  # a loop that outlives each call: it owns the child processes
        stack = AsyncExitStack()

        def start(kind: Kind) -> str:
            if not SECURED:
                return runner.run(stack.enter_async_context(running(kind, home))).url
            run = secured(home / "certificates")
            server = running(run.kind(kind), home, accounts=run.accounts)
            return runner.run(stack.enter_async_context(server)).url

        try:
            yield start
        finally:
            runner.run(stack.aclose())


@pytest.fixture(scope="session")
def etcd_url(_server: Callable[[Kind], str]) -> str:
    """A real etcd, shared by the run: use only your `namespace`."""
    return _server(ETCD)


@pytest.fixture(scope="session")
def nats_url(_server: Callable[[Kind], str]) -> str:
    """A real NATS with JetStream and `max_payload` 8 MB, shared by the run: use only your `namespace`."""
    return _server(NATS)


@pytest.fixture(scope="session")
def preloaded(nothing_left_behind: None) -> Iterator[Preloaded]:
    """The process that forks the services of the run's meshes."""
    with Preloaded() as forking:
        yield forking


@pytest.fixture(scope="session")
def state_home() -> Path:
    """The user's cache, so that only the first run converts models."""
    return Path("~/.cache/kvmesh").expanduser()


@pytest.fixture(scope="session")
def real_model_dir(state_home: Path) -> Path:
    """The default model, converted once."""
    return model_dir("smollm2-135m", state_home)


@pytest.fixture
def namespace() -> str:
    """The first part of etcd keys and NATS subjects of this test."""
    return f"test-{next(_counter)}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A service under test; what it wrote to stderr is in `log`."""

    popen: subprocess.Popen[bytes]
    log: Path

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_log(self, text: str) -> None:
        """Wait until its log contains `text`; fail with the log if it ends or never does."""
        wait_until(lambda: self._has_logged(text), lambda: f"{text!r} in\n{self.logged()}")

    def _has_logged(self, text: str) -> bool:
        ended = self.popen.poll() is not None
        if text in self.logged():
            return True
        assert not ended, f"ended with {self.popen.returncode} before {text!r}:\n{self.logged()}"
        return False

    def exit_code(self) -> int:
        """Wait until it has ended."""
        return self.popen.wait(PATIENCE_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.exit_code()

    def kill(self) -> None:
        """Kill its process group, and wait for its end."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.exit_code()


RunService = Callable[..., ServiceProcess]  # (module, *args, env=None) -> ServiceProcess


@pytest.fixture
def run_service(tmp_path: Path) -> Iterator[RunService]:
    """Start `python -m <module> <args>` from the repository root; it ends with the test, or with this process.

    It inherits our environment without MESH_* variables; `env` adds some.
    """
    with running_services(tmp_path) as start:
        yield start


@contextmanager
def running_services(home: Path) -> Iterator[RunService]:
    """Like `run_service`, for fixtures of other scopes. `home`: for logs."""
    started: list[ServiceProcess] = []

    def start(module: str, *args: str, env: Mapping[str, str] | None = None) -> ServiceProcess:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        log = home / f"{module}-{len(started)}.log"
        with log.open("wb") as stream:
            popen = subprocess.Popen(
                [*tethered(), sys.executable, "-m", module, *args],
                cwd=REPO,
                env={**inherited, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        started.append(ServiceProcess(popen, log))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()


def descendants(root: int) -> set[int]:
    """Return the live descendants of the process `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has just ended
            if state != "Z":
                parents[int(entry.name)] = int(ppid)
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {root}


def _command_line(pid: int) -> str:
    """Empty when it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
