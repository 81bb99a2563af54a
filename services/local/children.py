"""Run services as child processes: restart them with back-off when they die, and stop them."""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from components.backoff import Backoff
from components.startup import EX_CONFIG, WrongSettings
from services.local.child_process import CannotStart, describe_exit, run, stop
from services.local.output import Output
from services.local.shared_memory import SharedMemoryFiles

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 10.0
STEADY_S: Final = 30.0  # a process that ran for this long resets the back-off
GIVE_UP_AFTER: Final = 3  # deaths before the first "ready"

Announce = Callable[[str, str], Awaitable[None]]  # (name, instance id) of a child that died


@dataclass(frozen=True, slots=True)
class ChildSpec:
    name: str  # prefill-0
    command: Sequence[str]
    env: Mapping[str, str]


class RestartDelays:
    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.0)

    def after(self, lived_s: float) -> float:
        """Return the delay before the restart of a process that ran for `lived_s`."""
        if lived_s >= STEADY_S:
            self._backoff.reset()
        return self._backoff.failed()


class Supervision:
    gave_up: asyncio.Future[CannotStart | WrongSettings]  # the error that ends the run

    def __init__(self, output: Output, stop_timeout_s: float) -> None:
        self.output = output
        self.stop_timeout_s = stop_timeout_s
        self.hurry = asyncio.Event()  # set by a second Ctrl-C: kill at once
        self.shared_memory = SharedMemoryFiles()
        self.gave_up = asyncio.get_running_loop().create_future()


async def announce_nothing(_name: str, _instance_id: str) -> None:
    pass


class Child:
    def __init__(
        self,
        spec: ChildSpec,
        supervision: Supervision,
        *,
        essential: bool = True,
        announce: Announce = announce_nothing,
    ) -> None:
        """The run ends if an essential child cannot be started."""
        self.spec = spec
        self._essential = essential
        self._announce = announce
        self.instance_id: str | None = None  # of the current process, in etcd; None until it is ready
        self.ready = asyncio.Event()
        self.metrics_url: str | None = None
        self._shared = supervision
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._was_ready = False
        self._last_line = ""  # of its output, without log lines

    @property
    def leaving(self) -> bool:
        return self._stopping.is_set()

    def kill(self) -> bool:
        """Kill the current process as a crash would. Returns: whether there was one."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        process.kill()
        return True

    async def keep_running(self) -> None:
        delays, deaths = RestartDelays(), 0
        while not self._stopping.is_set():
            started = time.monotonic()
            returncode = await self._live_once()
            if self._stopping.is_set():
                return
            if returncode == EX_CONFIG and not self._was_ready:
                said = self._last_line or "its settings are wrong; see its output above"
                self._give_up(WrongSettings(f"{self.spec.name}: {said}"))
                return
            deaths += 1
            cause = describe_exit(returncode) + (": wrong settings" if returncode == EX_CONFIG else "")
            if not self._was_ready and deaths == GIVE_UP_AFTER:
                ended = f"{self.spec.name} ended {GIVE_UP_AFTER} times before it was ready ({cause})"
                self._give_up(CannotStart(f"{ended}; see its output above"))
                return
            delay_s = delays.after(time.monotonic() - started)
            asked = returncode == 0 and self._was_ready  # ended on request, by SIGTERM or `inspect drain --stop`
            what = "ended, starting again" if asked else f"died ({cause}), restart"
            self._shared.output.report(
                self.spec.name, f"{what} in {delay_s:g} s", level="info" if asked else "error", restarts=deaths
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def _live_once(self) -> int:
        self._last_line = ""
        try:
            async with asyncio.TaskGroup() as tasks:

                def started(process: Process) -> None:
                    self._started(process)
                    tasks.create_task(self._announce_death(process))

                try:
                    return await run(self.spec.command, self._show, env=self.spec.env, started=started)
                except CannotStart as exc:  # too many processes, for example, so retry later
                    self._shared.output.report(self.spec.name, exc.message, level="error")
                    return os.EX_OSERR
        finally:
            self.instance_id = None
            self.ready.clear()
            self._shared.output.end_progress(self.spec.name)
            if self._process is not None:
                self._shared.shared_memory.remove_files_of(self._process.pid)
                remove_folders_of(self._process.pid)
                self._process = None  # another process may get its id

    def _started(self, process: Process) -> None:
        self._process = process
        if self._stopping.is_set():  # `stop` was called during the start
            process.kill()

    async def _announce_death(self, process: Process) -> None:
        """Exit code 0 is not announced, because that process has removed its own record."""
        if await process.wait() != 0 and self.instance_id is not None and not self._shared.hurry.is_set():
            await self._announce(self.spec.name, self.instance_id)

    def _show(self, line: str) -> None:
        event = self._shared.output.show(self.spec.name, line)
        if event is None:
            self._last_line = line or self._last_line
        if event == "ready" and self._process is not None:
            self._was_ready = True
            facts = json.loads(line)
            self.metrics_url, self.instance_id = facts.get("metrics"), facts.get("instance")
            self._shared.shared_memory.remember(self._process.pid)
            self.ready.set()

    def _give_up(self, why: CannotStart | WrongSettings) -> None:
        if not self._essential:
            self._shared.output.report(self.spec.name, f"{why.message}; given up", level="error")
        elif not self._shared.gave_up.done():
            self._shared.gave_up.set_result(why)

    async def stop(self, timeout_s: float | None = None, hurry: asyncio.Event | None = None) -> bool:
        """Return whether the process is gone."""
        timeout_s, hurry = timeout_s or self._shared.stop_timeout_s, hurry or self._shared.hurry
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        self._shared.shared_memory.remember(process.pid)
        if not await stop(process, timeout_s, hurry):
            why = "" if hurry.is_set() else f"did not stop in {timeout_s:g} s: "
            self._shared.output.report(self.spec.name, f"{why}killed", level="warning")
        return process.returncode is not None


def remove_folders_of(pid: int) -> None:
    """Remove the temporary directories of a killed process, which could not remove them itself."""
    for folder in Path(tempfile.gettempdir()).glob(f"kvmesh-*-{pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)


class Tier:
    def __init__(self, supervision: Supervision, tasks: asyncio.TaskGroup, announce: Announce) -> None:
        self.children: list[Child] = []  # without retired ones
        self._shared = supervision
        self._tasks = tasks
        self._announce = announce
        self._retiring: set[asyncio.Task[None]] = set()
        self._retirement_over = asyncio.Event()

    def __iter__(self) -> Iterator[Child]:
        return iter(self.children)

    def start(self, spec: ChildSpec, *, essential: bool = True) -> None:
        child = Child(spec, self._shared, essential=essential, announce=self._announce)
        self.children.append(child)
        self._tasks.create_task(self._keep(child), name=spec.name)

    def retire_newest(self, drain_s: float) -> str:
        """Let the newest child finish its requests, within `drain_s`, and end. Returns at once: its name."""
        child = self.children.pop()
        task = self._tasks.create_task(self._retire(child, drain_s), name=f"retire-{child.spec.name}")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return child.spec.name

    async def _retire(self, child: Child, drain_s: float) -> None:
        if await child.stop(drain_s, self._retirement_over):
            self._shared.output.report(child.spec.name, "stopped")
        else:
            self._shared.output.report(child.spec.name, "killed, but not gone yet", level="warning")

    async def _keep(self, child: Child) -> None:
        await child.keep_running()
        if child in self.children:
            self.children.remove(child)

    async def stop(self) -> None:
        """Retiring children get no second SIGTERM, which would cut their streams off."""
        retiring = set(self._retiring)
        await asyncio.gather(*(child.stop() for child in list(self.children)), self._end_retirement(retiring))

    async def _end_retirement(self, retiring: set[asyncio.Task[None]]) -> None:
        if retiring:
            hurry = asyncio.ensure_future(self._shared.hurry.wait())
            ended = asyncio.ensure_future(asyncio.wait(retiring))
            await asyncio.wait({ended, hurry}, timeout=self._shared.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            self._retirement_over.set()
            await ended


@asynccontextmanager
async def running_children(
    specs: list[ChildSpec], supervision: Supervision, announce: Announce = announce_nothing
) -> AsyncIterator[Tier]:
    async with asyncio.TaskGroup() as tasks:
        tier = Tier(supervision, tasks, announce)
        for spec in specs:
            tier.start(spec)
        try:
            yield tier
        finally:
            await tier.stop()
