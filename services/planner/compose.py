"""Connector for workers in a compose project, by the docker command line."""

import asyncio
import logging
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from components.aio import BackgroundTasks
from components.errors import BackendUnavailable, Rejected
from components.planning.planner import Change
from components.planning.samples import PLANNED, Planned

log = logging.getLogger(__name__)

ASK_S: Final = 20.0
SCALE_S: Final = 900.0  # draining a worker, or building an image
STOP_S: Final = 5.0
LAST_OUTPUT: Final = 300  # characters of a failed command's output


class ComposeConnector:
    def __init__(self, command: str, files: str | None = None, project: str | None = None) -> None:
        """`files`: one file, or several separated by colons."""
        flags = [word for file in (files or "").split(":") if file for word in ("-f", file)]
        self._command = [*shlex.split(command), *flags, *(["-p", project] if project else [])]
        self._under_way: dict[Planned, int] = {}  # removing a worker lasts until it has drained
        self._tasks = BackgroundTasks()

    async def counts(self) -> Mapping[Planned, int]:
        """Return the running containers of each role; during a change, the requested number. Raises: BackendUnavailable."""
        return {role: await self._count(role) for role in PLANNED}

    async def scale(self, change: Change) -> None:
        """Begin to scale. A failure is visible in the next `counts`.

        Raises: BackendUnavailable, also if another change is in progress; Rejected, if the number has changed meanwhile.
        """
        if self._under_way:
            raise BackendUnavailable("another change is in progress")
        running = await self._count(change.role)
        if running != change.before:
            raise Rejected(f"{running} {change.role} containers run, not {change.before}")
        self._under_way[change.role] = change.after
        self._tasks.start(self._scale(change.role, change.after), "compose-scale")

    async def _count(self, role: Planned) -> int:
        if (under_way := self._under_way.get(role)) is not None:
            return under_way
        try:
            async with asyncio.timeout(ASK_S):
                listed = await self._run("ps", "--quiet", "--status", "running", role)
        except TimeoutError as exc:
            raise BackendUnavailable(f"{shlex.join(self._command)} does not answer") from exc
        return len(listed.split())

    async def _scale(self, role: Planned, count: int) -> None:
        try:
            async with asyncio.timeout(SCALE_S):
                await self._run("up", "--detach", "--no-deps", "--no-recreate", "--scale", f"{role}={count}", role)
        except (BackendUnavailable, TimeoutError) as exc:
            cause = exc.message if isinstance(exc, BackendUnavailable) else f"no end in {SCALE_S:g} s"
            log.warning("scaling failed", extra={"role": role, "count": count, "cause": cause})
        finally:
            del self._under_way[role]

    async def _run(self, *words: str) -> str:
        command: Sequence[str] = [*self._command, *words]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            raise BackendUnavailable(
                f"{command[0]} cannot be run: {exc.strerror} (MESH_PLANNER_COMPOSE_COMMAND)"
            ) from exc
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            raise
        if process.returncode:
            raise BackendUnavailable(f"{shlex.join(command)}: {err.decode(errors='replace').strip()[-LAST_OUTPUT:]}")
        return out.decode(errors="replace")
