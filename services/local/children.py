"""One service as a child process: started, read, restarted with back-off when it dies, stopped for sure."""

import asyncio
import contextlib
import json
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from components.startup import EX_CONFIG
from services.local.output import Output
from services.local.process import CannotStart, describe_exit, run, stop
from services.local.shared_memory import SharedMemoryFiles

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 10.0
STEADY_S: Final = 30.0  # a child that lived this long starts again at the first delay
GIVE_UP_AFTER: Final = 3  # deaths before the first "ready": a mistake in the set-up, which no restart mends

Announce = Callable[[str, str], Awaitable[None]]  # (child's name, instance id) of a process that has died


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str  # prefill-0
    command: Sequence[str]
    env: Mapping[str, str]


class Backoff:
    """How long to wait before the next start: doubles with each short life."""

    def __init__(self) -> None:
        self._next_s = FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s`."""
        if lived_s >= STEADY_S:
            self._next_s = FIRST_DELAY_S
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_DELAY_S)
        return delay_s


class Supervision:
    """What all children of one mesh share: how they are shown and stopped, and how one of them ends the run."""

    def __init__(self, output: Output, stop_timeout_s: float) -> None:
        self.output = output
        self.stop_timeout_s = stop_timeout_s
        self.hurry = asyncio.Event()  # a second Ctrl-C: no more waiting
        self.shared_memory = SharedMemoryFiles()
        self.gave_up: asyncio.Future[CannotStart] = asyncio.get_running_loop().create_future()


async def announce_nothing(_name: str, _instance_id: str) -> None:
    """For children that nobody else knows."""


class Child:
    """One service process and its successors."""

    def __init__(
        self,
        spec: ChildSpec,
        supervision: Supervision,
        *,
        essential: bool = True,
        announce: Announce = announce_nothing,
    ) -> None:
        """The run ends when an essential child cannot be started. `announce` is called for a process that dies."""
        self.spec = spec
        self._essential = essential
        self._announce = announce
        self._instance_id: str | None = None  # under which the process that runs now is registered
        self.ready = asyncio.Event()  # the process that runs now has said "ready"
        self.metrics_url: str | None = None  # where it said then that its own page is
        self._shared = supervision
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._was_ready = False
        self._last_words = ""  # of the process that runs now, outside of its log

    @property
    def leaving(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    async def keep_running(self) -> None:
        """Start it, and again when it dies, until `stop`."""
        backoff, deaths = Backoff(), 0
        while not self._stopping.is_set():
            started = time.monotonic()
            returncode = await self._live_once()
            if self._stopping.is_set():
                return
            if returncode == EX_CONFIG:
                self._give_up(f"{self.spec.name}: {self._last_words or 'its settings are wrong; see its lines'}")
                return
            deaths += 1
            cause = describe_exit(returncode)
            if not self._was_ready and deaths == GIVE_UP_AFTER:
                self._give_up(
                    f"{self.spec.name} ended {GIVE_UP_AFTER} times before it was ready ({cause}); see its lines"
                )
                return
            delay_s = backoff.after(time.monotonic() - started)
            self._shared.output.say(
                self.spec.name, f"died ({cause}), next try in {delay_s:g} s", level="error", restarts=deaths
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _live_once(self) -> int:
        self._last_words = ""
        try:
            async with asyncio.TaskGroup() as beside:

                def started(process: Process) -> None:
                    self._started(process)
                    beside.create_task(self._announce_death(process))

                return await run(self.spec.command, self._show, env=self.spec.env, started=started)
        finally:
            self._instance_id = None
            self.ready.clear()
            self._shared.output.end_progress(self.spec.name)
            if self._process is not None:
                self._shared.shared_memory.remove_files_of(self._process.pid)

    def _started(self, process: Process) -> None:
        self._process = process
        if self._stopping.is_set():  # `stop` came while it was being started, and missed it
            process.kill()

    async def _announce_death(self, process: Process) -> None:
        """Announce the end of `process`. One that ends with exit code 0 has said goodbye itself."""
        if await process.wait() != 0 and self._instance_id is not None and not self._shared.hurry.is_set():
            await self._announce(self.spec.name, self._instance_id)

    def _show(self, line: str) -> None:
        event = self._shared.output.show(self.spec.name, line)
        if event is None:
            self._last_words = line or self._last_words
        if event == "ready" and self._process is not None:
            self._was_ready = True
            facts = json.loads(line)
            self.metrics_url, self._instance_id = facts.get("metrics"), facts.get("instance")
            self._shared.shared_memory.remember(self._process.pid)
            self.ready.set()

    def _give_up(self, why: str) -> None:
        if not self._essential:
            self._shared.output.say(self.spec.name, f"{why}; it is given up", level="error")
        elif not self._shared.gave_up.done():
            self._shared.gave_up.set_result(CannotStart(why))

    async def stop(self, timeout_s: float | None = None, hurry: asyncio.Event | None = None) -> None:
        """SIGTERM, SIGKILL after the time-out or when `hurry` is set; returns when the process is gone."""
        timeout_s, hurry = timeout_s or self._shared.stop_timeout_s, hurry or self._shared.hurry
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._shared.shared_memory.remember(process.pid)
        if not await stop(process, timeout_s, hurry):
            why = "" if hurry.is_set() else f"did not stop in {timeout_s:g} s: "
            self._shared.output.say(self.spec.name, f"{why}killed", level="warning")


class Tier:
    """Children that start together and stop together; more may come meanwhile, and the newest may go."""

    def __init__(self, supervision: Supervision, tasks: asyncio.TaskGroup, announce: Announce) -> None:
        self.children: list[Child] = []  # without those that are leaving
        self._shared = supervision
        self._tasks = tasks
        self._announce = announce
        self._leaving: set[asyncio.Task[None]] = set()
        self._no_longer = asyncio.Event()  # those that are leaving have had their time

    def __iter__(self) -> Iterator[Child]:
        return iter(self.children)

    def start(self, spec: ChildSpec, *, essential: bool = True) -> None:
        """Start a child and keep it running."""
        child = Child(spec, self._shared, essential=essential, announce=self._announce)
        self.children.append(child)
        self._tasks.create_task(self._keep(child), name=spec.name)

    def retire_newest(self, drain_s: float) -> str:
        """Have the newest child finish what it has, for `drain_s` at most, and not come back. Returns: its name, at once."""
        child = self.children.pop()
        task = self._tasks.create_task(self._retire(child, drain_s), name=f"retire-{child.spec.name}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return child.spec.name

    async def _retire(self, child: Child, drain_s: float) -> None:
        try:
            await child.stop(drain_s, self._no_longer)
        except TimeoutError:  # its memory may be large: nobody else has to go for that
            self._shared.output.say(child.spec.name, "was killed and is not gone yet", level="warning")
        else:
            self._shared.output.say(child.spec.name, "has left")

    async def _keep(self, child: Child) -> None:
        await child.keep_running()
        if child in self.children:  # it was given up
            self.children.remove(child)

    async def stop(self) -> None:
        """Stop all of them. Those that are leaving already get no second SIGTERM, which would end them in mid-stream."""
        leaving = set(self._leaving)
        await asyncio.gather(*(child.stop() for child in list(self.children)), self._part_with(leaving))

    async def _part_with(self, leaving: set[asyncio.Task[None]]) -> None:
        if leaving:
            hurry = asyncio.ensure_future(self._shared.hurry.wait())
            left = asyncio.ensure_future(asyncio.wait(leaving))
            await asyncio.wait({left, hurry}, timeout=self._shared.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            self._no_longer.set()
            await left


@asynccontextmanager
async def running_children(
    specs: list[ChildSpec], supervision: Supervision, announce: Announce = announce_nothing
) -> AsyncIterator[Tier]:
    """Children of one tier, all started at once, all stopped at once when the block ends."""
    async with asyncio.TaskGroup() as tasks:
        tier = Tier(supervision, tasks, announce)
        for spec in specs:
            tier.start(spec)
        try:
            yield tier
        finally:
            await tier.stop()
