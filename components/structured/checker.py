"""Constraints of clients, checked before anything else is done for them: in other processes, within a budget, once each."""

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgpack

from components.errors import Overloaded, QueueFull
from components.structured.check import Unusable
from components.structured.metrics import ConstraintMetrics
from components.structured.sandbox import LENGTH
from components.wire.sampling import Constraint

log = logging.getLogger(__name__)

PROCESSES: Final = 2  # the second starts when the first is busy: one bomb holds up nobody
MAX_WAITING: Final = 128
PATIENCE: Final = 30  # times the budget, by the clock: then it is the machine that is slow
START_S: Final = 30.0
MAX_KNOWN: Final = 1024
MAX_KNOWN_BYTES: Final = 32 << 20
TOO_COMPLEX: Final = "it is too complex: compiling it takes more time or memory than it may"


class ConstraintChecker:
    """Belongs to the event loop. Processes start when they are needed, and again when one has died of its work."""

    def __init__(self, folder: Path, budget_s: float, metrics: ConstraintMetrics) -> None:
        """`folder`: the model's, for its tokenizer. `budget_s`: CPU seconds for one constraint."""
        self._folder = folder
        self._budget_s = budget_s
        self._metrics = metrics
        self._known: OrderedDict[Constraint, Constraint | str] = OrderedDict()
        self._known_bytes = 0
        self._checking: dict[Constraint, asyncio.Task[Constraint | str]] = {}
        self._idle = [_Sandbox(folder, budget_s) for _ in range(PROCESSES)]
        self._turn = asyncio.Semaphore(PROCESSES)

    async def check(self, constraint: Constraint) -> Constraint:
        """The constraint in the form in which the mesh carries it.

        Raises: Unusable, saying why it is refused; QueueFull; Overloaded, when the machine is too slow to tell.
        """
        known = self._known.get(constraint)
        if known is None:
            known = await asyncio.shield(self._task(constraint))  # others may wait for it too
        else:
            self._known.move_to_end(constraint)
            self._metrics.count("cached")
        if isinstance(known, str):
            raise Unusable(known)
        return known

    async def aclose(self) -> None:
        """End the processes."""
        for task in list(self._checking.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Overloaded):
                await task
        for sandbox in self._idle:
            await sandbox.end()

    def _task(self, constraint: Constraint) -> asyncio.Task[Constraint | str]:
        task = self._checking.get(constraint)
        if task is None:
            if len(self._checking) >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} constraints are waiting to be checked")
            task = self._checking[constraint] = asyncio.create_task(self._check(constraint))
            task.add_done_callback(lambda done: self._checked(constraint, done))
        return task

    async def _check(self, constraint: Constraint) -> Constraint | str:
        started = time.perf_counter()
        async with self._turn:
            sandbox = self._idle.pop()  # the one that worked last: it is there already
            try:
                known = await sandbox.check(constraint)
            finally:
                self._idle.append(sandbox)
        self._metrics.count("refused" if isinstance(known, str) else "compiled", time.perf_counter() - started)
        return known

    def _checked(self, constraint: Constraint, task: asyncio.Task[Constraint | str]) -> None:
        del self._checking[constraint]
        if task.cancelled() or task.exception() is not None:
            return  # the next one who asks tries again
        self._known[constraint] = task.result()
        self._known_bytes += len(constraint.text)
        while len(self._known) > MAX_KNOWN or self._known_bytes > MAX_KNOWN_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[0].text)


class _Sandbox:
    """One process, or the place for one."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self._command = ["-m", "components.structured.sandbox", str(folder), str(budget_s)]
        self._patience_s = PATIENCE * budget_s
        self._process: Process | None = None

    async def check(self, constraint: Constraint) -> Constraint | str:
        """Raises: Overloaded."""
        kept = False
        try:
            if self._process is None:
                self._process = await self._start()
            async with asyncio.timeout(self._patience_s):
                reply = await _ask(self._process, [constraint.kind, constraint.text])
            kept = True
        except TimeoutError as exc:
            raise Overloaded("checking a constraint took too long") from exc
        except (asyncio.IncompleteReadError, ConnectionError):
            log.warning("a constraint was too much", extra={"kind": constraint.kind, "bytes": len(constraint.text)})
            return TOO_COMPLEX
        finally:
            if not kept:
                await self.end()
        return Constraint(kind=reply[0], text=reply[1]) if len(reply) == 2 else str(reply[0])

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, *self._command, stdin=PIPE, stdout=PIPE)
        try:
            async with asyncio.timeout(START_S):
                await _read(process)
        except BaseException as exc:
            await _end(process)
            if isinstance(exc, TimeoutError | asyncio.IncompleteReadError):
                raise Overloaded("the process that checks constraints did not start") from exc
            raise
        return process

    async def end(self) -> None:
        """There is no process any more."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)


async def _ask(process: Process, request: list[str]) -> list[Any]:
    assert process.stdin is not None
    packed: bytes = msgpack.packb(request)
    process.stdin.write(LENGTH.pack(len(packed)) + packed)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> list[Any]:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    reply: list[Any] = msgpack.unpackb(await process.stdout.readexactly(length))
    return reply


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@asynccontextmanager
async def open_checker(folder: Path, budget_s: float, metrics: ConstraintMetrics) -> AsyncIterator[ConstraintChecker]:
    """See `ConstraintChecker`; leaving it ends its processes."""
    checker = ConstraintChecker(folder, budget_s, metrics)
    try:
        yield checker
    finally:
        await checker.aclose()
