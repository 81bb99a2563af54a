"""A whole mesh of real processes for a test, and the frontend's own client, which returns token ids."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import httpx
from opentelemetry.sdk.trace import TracerProvider

from components.discovery.book import InstanceBook
from components.discovery.registry import join_registry
from components.messaging.bus import Bus
from components.messaging.clocks import now_ms
from components.messaging.connection import connect_bus
from components.messaging.fleet import open_fleet
from components.messaging.inbox import open_inbox
from components.messaging.liveness import Liveness, watch_heartbeats
from components.permissions import ADMINISTRATOR
from components.settings import MeshSettings
from components.wire.generate import StreamItem
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.model.mock_model import is_mock
from services.frontend.config import FrontendSettings
from services.frontend.mesh_client import MeshClient
from services.frontend.ports import Prompt
from services.frontend.response_stream import make_stream
from services.local.accounts import Backends, Reach, user_of
from services.local.children import remove_folders_of
from tests.mesh.preloaded import MOCK, TORCH, Fork, Preloaded
from tests.secured import reach_of
from tests.services.frontend.reading import reading
from tests.waiting import PATIENCE_S, until, wait_until

REPO: Final = Path(__file__).resolve().parents[2]
STORED_BYTES: Final = 1_000_000  # NATS reserves them for each mesh of the run

tracer: Final = TracerProvider(shutdown_on_exit=False).get_tracer("test")


@dataclass(slots=True)
class Worker:
    """One service process."""

    role: str
    popen: subprocess.Popen[bytes] | Fork
    log: Path

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Wait until it serves; fail with its log if it ends or never does."""

        def is_ready() -> bool:
            assert self.popen.poll() is None, f"{self.role} ended with {self.popen.returncode}:\n{self.logged()}"
            return '"event": "ready"' in self.logged()

        wait_until(is_ready, lambda: f"{self.role} is ready:\n{self.logged()}")

    @property
    def url(self) -> str:
        """The address of a frontend that is ready."""
        line = next(x for x in self.logged().splitlines() if '"event": "ready"' in x)
        return str(json.loads(line)["url"])

    def models(self) -> list[dict[str, Any]]:
        """Return the models that a frontend lists."""
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return found

    def exit_code(self) -> int:
        """Wait until it has ended."""
        return self.popen.wait(PATIENCE_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.popen.terminate()
        return self.exit_code()

    def kill(self) -> None:
        """kill -9, reap, and remove what the process could not remove itself."""
        with suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGKILL)
        self.exit_code()
        remove_folders_of(self.popen.pid)


@dataclass(slots=True)
class MeshProcesses:
    """The processes of one mesh; leaving it stops them all."""

    etcd_url: str
    nats_url: str
    namespace: str
    home: Path
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    preloaded: Preloaded | None = None  # forks them; without it, commands are run
    workers: list[Worker] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)  # by role, instead of the service itself
    reach: Reach | None = None  # users of the servers, if each role has its own
    _has_stream: bool = False

    def __post_init__(self) -> None:
        """Share the compiled kernels with the user's own meshes, so that only the first run compiles."""
        compiled = Path("~/.cache/kvmesh/compile").expanduser()
        compiled.mkdir(parents=True, exist_ok=True)
        (self.home / "compile").symlink_to(compiled, target_is_directory=True)
        if self.reach is None:
            self.reach = reach_of(self.etcd_url, self.nats_url, self.namespace)

    def start(self, *roles: str, **env: str) -> list[Worker]:
        """Start a process for each role; return when all are ready."""
        started = [self._spawn(role, env) for role in roles]
        for worker in started:
            worker.wait_ready()
        return started

    def start_one(self, role: str, **env: str) -> Worker:
        return self.start(role, **env)[0]

    def settings(self) -> MeshSettings:
        """Return those of the test itself, which is the administrator."""
        settings = MeshSettings(etcd_url=self.etcd_url, nats_url=self.nats_url, namespace=self.namespace)
        return settings if self.reach is None else self.reach(ADMINISTRATOR).applied(settings)

    def as_user(self, user: str) -> Backends:
        """Return the addresses and login for a process that the test starts."""
        return Backends(self.etcd_url, self.nats_url) if self.reach is None else self.reach(user)

    def _access(self, role: str) -> Mapping[str, str]:
        number = sum(worker.role == role for worker in self.workers)
        return {} if self.reach is None else self.reach(user_of(role, number)).variables()

    def one(self, role: str) -> Worker:
        """The running process of a role."""
        return next(w for w in self.workers if w.role == role and w.popen.poll() is None)

    def make_response_stream(self, administrator: Backends) -> None:
        """Do as an operator does, in a thread: some tests run an event loop."""
        settings = FrontendSettings(namespace=self.namespace, stored_responses_bytes=STORED_BYTES)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, make_stream(administrator.applied(settings))).result()
        self._has_stream = True

    def _spawn(self, role: str, env: Mapping[str, str]) -> Worker:
        stores = self.env.get("MESH_FRONTEND_MAX_STORED_RESPONSES") != "0"
        if role == "frontend" and stores and self.reach is not None and not self._has_stream:
            self.make_response_stream(self.reach(ADMINISTRATOR))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
        settings = {
            "MESH_ETCD_URL": self.etcd_url,
            "MESH_NATS_URL": self.nats_url,
            **self._access(role),
            "MESH_NAMESPACE": self.namespace,
            "MESH_STATE_DIR": str(self.home),
            "MESH_MODEL": self.model,
            "MESH_LOG_FORMAT": "json",
            "MESH_TRANSFER_TIMEOUT_S": "6",  # a killed prefill's pages stay pinned for so long
            "MESH_FRONTEND_PORT": "0",
            "MESH_FRONTEND_STORED_RESPONSES_BYTES": str(STORED_BYTES),
            **self.env,
            **env,
        }
        log = self.home / f"{role}-{len(self.workers)}.log"
        worker = Worker(
            role, self._run(self.modules.get(role, f"services.{role}"), {**inherited, **settings}, log), log
        )
        self.workers.append(worker)
        return worker

    def _run(self, module: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes] | Fork:
        if self.preloaded is not None:
            return self.preloaded.start(MOCK if is_mock(self.model) else TORCH, module, env, log)
        with log.open("wb") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=REPO,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.popen.poll() is None:
                worker.popen.terminate()
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.popen.wait(10)
            worker.kill()


@dataclass(slots=True)
class Answer:
    """The output of one branch."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Client:
    """The mesh as a frontend sees it."""

    mesh: MeshClient
    bus: Bus
    book: InstanceBook
    prefills: Liveness
    decodes: Liveness

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        model: str,
        seed: int = 0,
        temperature: float = 0.0,
        salt: str = "",
        **sampling: Any,
    ) -> list[int]:
        """Generate `max_tokens` ids, also after an end of text."""
        how = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True, **sampling)
        [answer] = await self.branches(token_ids, how, model=model, salt=salt)
        return answer.token_ids

    async def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "", *, model: str, in_flight: int = 32
    ) -> list[list[int]]:
        places = asyncio.Semaphore(in_flight)

        async def one(prompt: Sequence[int]) -> list[int]:
            async with places:
                return await self.generate(prompt, max_tokens, model=model, salt=salt)

        return list(await asyncio.gather(*map(one, prompts)))

    async def branches(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        model: str,
        salt: str = "",
    ) -> list["Answer"]:
        prompt = Prompt(uuid4().hex, model, list(token_ids), sampling, salt, now_ms() + 120_000)

        async def read(deltas: AsyncGenerator[StreamItem, None]) -> Answer:
            answer = Answer()
            async for delta in deltas:
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs or ()
                answer.finish = delta.finish
            return answer

        with tracer.start_as_current_span("test"):  # traced, because its parent span is
            async with reading(self.mesh, prompt) as streams:
                return list(await asyncio.gather(*map(read, streams)))

    async def until_usable(self, role: Role, count: int = 1) -> list[InstanceRecord]:
        """Wait until `count` instances of a role are usable."""
        liveness = self.prefills if role == "prefill" else self.decodes
        usable: list[InstanceRecord] = []

        def are_there() -> bool:
            usable[:] = liveness.usable()
            return len(usable) >= count and all(liveness.last_heartbeat(r.instance_id) is not None for r in usable)

        await until(are_there, lambda: f"{count} x {role}: {usable}")
        return usable

    async def until_quiet(self) -> list[Heartbeat]:
        """Wait until no worker holds a page; return their heartbeats."""
        beats: list[Heartbeat] = []

        def are_quiet() -> bool:
            beats[:] = self.beats()
            return bool(beats) and all(b.held_pages == 0 and not b.busy and not b.num_reserved for b in beats)

        await until(are_quiet, lambda: f"quiet: {beats}")
        return beats

    def beats(self, *roles: Role) -> Iterator[Heartbeat]:
        """Yield the last heartbeat of each usable worker of these roles, by default of both."""
        for liveness in (
            self.prefills if role == "prefill" else self.decodes for role in roles or ("prefill", "decode")
        ):
            for record in liveness.usable():
                if (beat := liveness.last_heartbeat(record.instance_id)) is not None:
                    yield beat


@asynccontextmanager
async def open_client(mesh: MeshProcesses, model: str) -> AsyncIterator[Client]:
    """Open a client in the test's own event loop."""
    mine = mesh.settings()
    async with (
        connect_bus(mine.nats_url, "test", mine.nats_access("test")) as bus,
        join_registry(mine.etcd_url, mesh.namespace, 10.0, mine.etcd_access()) as registry,
        open_fleet(bus, mesh.namespace, "decode", registry.book, "round_robin") as decodes,
        watch_heartbeats(bus, mesh.namespace, "prefill", registry.book) as prefills,
        open_inbox(bus, f"{mesh.namespace}.tokens.frontend.test-{uuid4().hex[:8]}") as inbox,
    ):
        client = Client(MeshClient(bus, inbox, decodes, model), bus, registry.book, prefills, decodes.alive)
        await client.until_usable("decode")
        yield client


def metrics_of(url: str | None) -> list[str]:
    return httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()


def metric(url: str | None, name: str) -> float:
    """Return a value of the metrics page. `name`: with its labels."""
    return float(next(line.split()[1] for line in metrics_of(url) if line.startswith(f"{name} ")))
