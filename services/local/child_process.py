"""Child processes that cannot outlive this process, each in its own session."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from components.errors import MeshError

log = logging.getLogger(__name__)

_TETHER: Final = str(Path(__file__).with_name("tether.py"))
KILL_WAIT_S: Final = 5.0  # a process that takes longer is stuck in the kernel
DRAIN_S: Final = 1.0  # for a dead child's last lines
LONGEST_LINE_BYTES: Final = 2**20


class CannotStart(MeshError):
    """The mesh cannot start or keep running; the message is one line for the user."""


def tethered() -> list[str]:
    # The kernel ties the child to the thread that forks, so the end of a worker thread would kill the child.
    assert threading.current_thread() is threading.main_thread()
    return [sys.executable, "-I", "-S", _TETHER, str(os.getpid())]


async def spawn(
    command: Sequence[str], *, output: int | IO[bytes], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Process:
    """`command` gets its own session: Ctrl-C does not reach it, and `kill` reaches all that it started."""
    return await asyncio.create_subprocess_exec(
        *tethered(),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )


async def run(
    command: Sequence[str],
    show: Callable[[str], object],
    *,
    env: Mapping[str, str] | None = None,
    started: Callable[[Process], object] = lambda _: None,
) -> int:
    """Pass each line of output to `show`. Returns: the exit code, negative for a signal.

    Every process of its group has been sent SIGKILL when this returns or is cancelled.

    Raises: CannotStart, if the kernel refuses a new process.
    """
    # Not asyncio's PIPE, because `Process.wait` would wait for all processes that inherited it.
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb", buffering=0)
    )
    try:
        try:
            process = await spawn(command, output=write_end, env=env)
        except OSError as exc:
            raise CannotStart(f"no process for {command[0]}: {exc.strerror or exc}") from exc
        finally:
            os.close(write_end)
        reading = asyncio.create_task(_each_line(lines, show))
        try:
            started(process)
            return await process.wait()
        finally:
            await kill(process)
            await asyncio.wait({reading}, timeout=DRAIN_S)
            reading.cancel()
    finally:
        pipe.close()


async def _each_line(stream: asyncio.StreamReader, show: Callable[[str], object]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            line = b"(a line too long to show)\n"
        if not line:
            return
        try:
            show(line.decode(errors="replace").rstrip())
        except Exception:  # continue, because an unread pipe would block the child
            log.exception("cannot show a line of a child")


async def stop(process: Process, timeout_s: float, hurry: asyncio.Event | None = None) -> bool:
    """Send SIGTERM, then SIGKILL. Returns: whether the process ended before `timeout_s` or `hurry`.

    A killed process may be there for some time after the return, while the kernel frees much memory.
    """
    if process.returncode is not None:
        return True
    process.terminate()
    exited = asyncio.ensure_future(process.wait())
    hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
    try:
        await asyncio.wait({exited, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return exited.done()
    finally:
        exited.cancel()
        hurried.cancel()
        await kill(process)


async def kill(process: Process) -> None:
    """Kill the group of `process` before the kernel can reuse its id. Wait at most KILL_WAIT_S for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_WAIT_S):
            await process.wait()


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
