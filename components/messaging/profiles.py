"""Profiles of a worker over NATS: recorded one at a time, and fetched in parts."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Final, Protocol

from components.errors import InvariantBroken, Overloaded, Rejected
from components.messaging.call_server import Endpoint
from components.wire.inspection import FetchProfile, ProfilePart, ProfileStarted, StartProfile

MAX_SECONDS: Final = 60.0  # a second takes up to 10 MB, uncompressed
PART_BYTES: Final = 512 * 1024  # half of NATS's default payload
READY_TIMEOUT_S: Final = 2.0  # before an empty answer
MAX_KEPT_PROFILES: Final = 2  # a new one removes the oldest


class Profiler(Protocol):
    async def start(self) -> None:
        """Raise Rejected if there is nothing to record."""

    async def finish(self, seconds: float, path: Path) -> tuple[float, int]:
        """Record for `seconds` and write to `path`; stop at once if cancelled.

        Returns: seconds and steps recorded.
        """


@dataclass(frozen=True, slots=True)
class Ordered:
    path: Path
    until_s: float  # monotonic
    task: asyncio.Task[tuple[float, int]]


class Profiles:
    def __init__(self, who: str, profiler: Profiler) -> None:
        self._who = who
        self._profiler = profiler
        # Created for the first profile. After kill -9, services.local finds it by the process id in its name.
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._ordered: dict[str, Ordered] = {}
        self._starting = False

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("profile", StartProfile, self.start),
            Endpoint("profile_part", FetchProfile, self.part, is_idempotent=True),
        ]

    async def start(self, request: StartProfile) -> ProfileStarted:
        if not 0 < request.seconds <= MAX_SECONDS:
            raise Rejected(f"seconds must be above 0 and at most {MAX_SECONDS:.0f}", param="seconds")
        self._refuse_second()
        self._starting = True
        try:
            home = await self._begin()
        except OSError as exc:
            raise InvariantBroken(f"the profile of {self._who} cannot be kept there: {exc}") from exc
        finally:
            self._starting = False
        for profile_id in list(self._ordered)[: 1 - MAX_KEPT_PROFILES]:
            self._ordered.pop(profile_id).path.unlink(missing_ok=True)
        profile_id = token_hex(4)
        path = home / f"{profile_id}.json.gz"
        task = asyncio.create_task(self._profiler.finish(request.seconds, path))
        self._ordered[profile_id] = Ordered(path, monotonic() + request.seconds, task)
        return ProfileStarted(profile_id=profile_id)

    async def part(self, request: FetchProfile) -> ProfilePart:
        """The next bytes of a profile; none if it is not ready.

        Raises: Rejected, or the error of the recording.
        """
        ordered = self._ordered.get(request.profile_id)
        if ordered is None:
            raise Rejected(f"{self._who} has no profile {request.profile_id[:16]!r}", param="profile_id")
        await asyncio.wait((ordered.task,), timeout=READY_TIMEOUT_S)
        if not ordered.task.done():
            return ProfilePart(data=b"")
        try:
            seconds, steps = ordered.task.result()
            size, data = await asyncio.to_thread(_read, ordered.path, max(0, request.offset))
        except OSError as exc:
            raise InvariantBroken(f"the profile of {self._who} cannot be kept there: {exc}") from exc
        return ProfilePart(data=data, size_bytes=size, seconds=seconds, steps=steps)

    async def close(self) -> None:
        tasks = [ordered.task for ordered in self._ordered.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._home is not None:
            self._home.cleanup()

    async def _begin(self) -> Path:
        """The directory for the profiler's files; removed if the start fails."""
        home = self._home or tempfile.TemporaryDirectory(
            prefix=f"kvmesh-profile-{os.getpid()}-", ignore_cleanup_errors=True
        )
        try:
            await self._profiler.start()
        except BaseException:
            if home is not self._home:
                home.cleanup()
            raise
        self._home = home
        return Path(home.name)

    def _refuse_second(self) -> None:
        running = [(name, o) for name, o in self._ordered.items() if not o.task.done()]
        if running or self._starting:
            name, left_s = (running[0][0], max(0.0, running[0][1].until_s - monotonic())) if running else ("", 0.0)
            raise Overloaded(
                f"{self._who} is being profiled already (profile {name or 'about to start'}, {left_s:.1f} s to go)",
                retry_after_s=max(1.0, left_s),
            )


@asynccontextmanager
async def keep_profiles(who: str, profiler: Profiler) -> AsyncIterator[Profiles]:
    profiles = Profiles(who, profiler)
    try:
        yield profiles
    finally:
        await profiles.close()


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        return path.stat().st_size, file.read(PART_BYTES)
