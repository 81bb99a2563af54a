"""Checks each constraint once, in other processes, within a budget of CPU time."""

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack

from components.aio import exception_of
from components.errors import Overloaded, TooManyChecks
from components.structured.check_constraint import Unusable
from components.structured.metrics import ConstraintMetrics
from components.structured.sandbox import LENGTH
from components.wire.sampling import Constraint

log = logging.getLogger(__name__)

PROCESSES: Final = 3  # each starts when the others are busy
OF_A_CALLER: Final = 2  # at once, so that one process is left for others
MAX_WAITING: Final = 512  # also those being checked
MAX_WAITING_OF_A_CALLER: Final = 128
LEFT_S: Final = 0.5  # grace period of an abandoned check, about a process's start time
PATIENCE: Final = 30  # wall-clock time, times the budget
START_S: Final = 30.0
MAX_KNOWN: Final = 1024
MAX_KNOWN_BYTES: Final = 32 << 20
TOO_COMPLEX: Final = "it is too complex: compiling it exceeds the limit of time or memory"


@dataclass(slots=True, eq=False)
class _Caller:
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(OF_A_CALLER))
    checks: dict[Constraint, "_Check"] = field(default_factory=dict)
    num_tasks: int = 0  # also abandoned ones that run


@dataclass(slots=True, eq=False)
class _Check:
    constraint: Constraint
    caller: _Caller
    task: asyncio.Task[Constraint | str] = field(init=False)
    num_waiting: int = 0
    has_process: bool = False
    giving_up: asyncio.TimerHandle | None = None


class ConstraintChecker:
    """Use it only on the event loop. Processes start on demand."""

    def __init__(self, folder: Path, budget_s: float, metrics: ConstraintMetrics) -> None:
        """`folder`: contains the tokenizer. `budget_s`: CPU seconds per constraint."""
        self._metrics = metrics
        self._known: OrderedDict[Constraint, Constraint | str] = OrderedDict()
        self._known_bytes = 0
        self._callers: dict[bytes, _Caller] = {}
        self._tasks: set[asyncio.Task[Constraint | str]] = set()
        self._idle = [_Sandbox(folder, budget_s) for _ in range(PROCESSES)]
        # the queue is first in, first out; OF_A_CALLER limits each caller
        self._turn = asyncio.Semaphore(PROCESSES)

    async def check(self, constraint: Constraint, caller: bytes = b"") -> Constraint:
        """The constraint in the form for the wire.

        Raises: Unusable; TooManyChecks; Overloaded, if the machine is too slow.
        """
        known = self._recall(constraint)
        if known is None:
            known = await self._wait(self._check_of(constraint, caller))
        if isinstance(known, str):
            raise Unusable(known)
        return known

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for sandbox in self._idle:
            await sandbox.end()

    def _recall(self, constraint: Constraint) -> Constraint | str | None:
        known = self._known.get(constraint)
        if known is not None:
            self._known.move_to_end(constraint)
            self._metrics.count("cached")
        return known

    def _check_of(self, constraint: Constraint, caller_id: bytes) -> _Check:
        """Callers do not share checks: one would wait for the other's turn."""
        caller = self._callers.get(caller_id) or _Caller()
        check = caller.checks.get(constraint)
        if check is not None:
            return check
        if len(caller.checks) >= MAX_WAITING_OF_A_CALLER:
            raise TooManyChecks(f"{MAX_WAITING_OF_A_CALLER} constraints of one caller are waiting to be checked")
        if sum(len(other.checks) for other in self._callers.values()) >= MAX_WAITING:
            raise TooManyChecks(f"{MAX_WAITING} constraints are waiting to be checked")
        self._callers[caller_id] = caller
        check = caller.checks[constraint] = _Check(constraint, caller)
        check.task = asyncio.create_task(self._check(check))
        caller.num_tasks += 1
        self._tasks.add(check.task)
        check.task.add_done_callback(lambda done: self._ended(check, caller_id, done))
        return check

    async def _wait(self, check: _Check) -> Constraint | str:
        check.num_waiting += 1
        if check.giving_up is not None:
            check.giving_up.cancel()
        try:
            return await asyncio.shield(check.task)  # other requests may also wait for it
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and not check.task.done():
                self._left_alone(check)

    def _left_alone(self, check: _Check) -> None:
        if check.has_process:
            check.giving_up = asyncio.get_running_loop().call_later(LEFT_S, self._give_up, check)
        else:
            self._give_up(check)

    def _give_up(self, check: _Check) -> None:
        check.caller.checks.pop(check.constraint, None)
        check.task.cancel()

    async def _check(self, check: _Check) -> Constraint | str:
        started = time.perf_counter()
        async with check.caller.turn, self._turn:
            known = self._recall(check.constraint)  # another caller's check may have ended
            if known is not None:
                return known
            check.has_process = True
            sandbox = self._idle.pop()
            try:
                known = await sandbox.check(check.constraint)
            finally:
                # The last is used next, so one with a running process.
                self._idle.insert(len(self._idle) if sandbox.is_there else 0, sandbox)
            self._learn(check.constraint, known)
        self._metrics.count("refused" if isinstance(known, str) else "compiled", time.perf_counter() - started)
        return known

    def _ended(self, check: _Check, caller_id: bytes, task: asyncio.Task[Constraint | str]) -> None:
        self._tasks.discard(task)
        caller = check.caller
        if caller.checks.get(check.constraint) is check:
            del caller.checks[check.constraint]
        caller.num_tasks -= 1
        if not caller.num_tasks:
            del self._callers[caller_id]
        if check.giving_up is not None:
            check.giving_up.cancel()
        exception_of(task)  # or asyncio logs it, if no request waits

    def _learn(self, constraint: Constraint, known: Constraint | str) -> None:
        if constraint in self._known:
            return
        self._known[constraint] = known
        self._known_bytes += len(constraint.text)
        while len(self._known) > MAX_KNOWN or self._known_bytes > MAX_KNOWN_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[0].text)


class _Sandbox:
    def __init__(self, folder: Path, budget_s: float) -> None:
        self._command = ["-m", "components.structured.sandbox", str(folder), str(budget_s)]
        self._patience_s = PATIENCE * budget_s
        self._process: asyncio.Task[Process] | None = None  # set when it starts

    @property
    def is_there(self) -> bool:
        return self._process is not None

    async def check(self, constraint: Constraint) -> Constraint | str:
        if self._process is None:
            self._process = asyncio.create_task(self._start())
        process = await asyncio.shield(self._process)  # the start outlives this check
        if process.returncode is not None:  # killed while idle, so not by this constraint
            await self.end()
            self._process = asyncio.create_task(self._start())
            process = await asyncio.shield(self._process)
        kept = False
        try:
            async with asyncio.timeout(self._patience_s):
                reply = await _ask(process, [constraint.kind, constraint.text])
            kept = True
        except TimeoutError as exc:
            raise Overloaded("checking a constraint took too long") from exc
        except (asyncio.IncompleteReadError, ConnectionError):
            log.warning(
                "a constraint was refused: checking it exceeded its time or memory",
                extra={"kind": constraint.kind, "bytes": len(constraint.text)},
            )
            return TOO_COMPLEX
        finally:
            if not kept:
                await self.end()
        return Constraint(kind=reply[0], text=reply[1]) if len(reply) == 2 else str(reply[0])

    async def _start(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(sys.executable, *self._command, stdin=PIPE, stdout=PIPE)
            try:
                async with asyncio.timeout(START_S):
                    await _read(process)
            except BaseException:
                await _end(process)
                raise
        except BaseException as exc:
            self._process = None
            if isinstance(exc, TimeoutError | asyncio.IncompleteReadError):
                raise Overloaded("the process that checks constraints did not start") from exc
            raise
        return process

    async def end(self) -> None:
        started, self._process = self._process, None
        if started is None:
            return
        started.cancel()
        await asyncio.wait((started,))
        if not started.cancelled() and started.exception() is None:
            await _end(started.result())


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
    checker = ConstraintChecker(folder, budget_s, metrics)
    try:
        yield checker
    finally:
        await checker.aclose()
