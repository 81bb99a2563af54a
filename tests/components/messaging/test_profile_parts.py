"""A profile over a real NATS: larger than a message, refused twice, gone with its worker."""

import asyncio
import gzip
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from components.errors import InvariantBroken, Overloaded, Rejected
from components.messaging import profiles
from components.messaging.bus import Bus
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.messaging.profiles import Profiles, keep_profiles
from components.wire.inspection import FetchProfile, ProfilePart, ProfileStarted, StartProfile
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]


class FakeProfiler:
    """Writes `content` after the requested time, or once it is `over`."""

    def __init__(self, content: bytes = b"", error: Exception | None = None, refusal: Exception | None = None) -> None:
        self.content = content
        self.error = error
        self.refusal = refusal
        self.stopped = 0
        self.over = asyncio.Event()

    async def start(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def finish(self, seconds: float, path: Path) -> tuple[float, int]:
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), seconds)
        finally:
            self.stopped += 1
        if self.error is not None:
            raise self.error
        path.write_bytes(self.content)
        return seconds, 7


@asynccontextmanager
async def worker(nats_url: str, subject: str, profiler: FakeProfiler) -> AsyncIterator[tuple[Bus, Profiles]]:
    async with (
        connect_bus(nats_url, "test") as bus,
        keep_profiles("decode d1", profiler) as kept,
        serve_calls(bus, "decode", subject, kept.endpoints(), {}),
    ):
        yield bus, kept


async def start(bus: Bus, subject: str, seconds: float) -> str:
    order = StartProfile(seconds=seconds)
    return (await bus.call(f"{subject}.profile", order, ProfileStarted, timeout_s=PATIENCE_S)).profile_id


async def part(bus: Bus, subject: str, profile_id: str, offset: int = 0) -> ProfilePart:
    wanted = FetchProfile(profile_id=profile_id, offset=offset)
    return await bus.call(f"{subject}.profile_part", wanted, ProfilePart, timeout_s=PATIENCE_S)


async def test_a_profile_larger_than_a_message_arrives_in_parts(nats_url: str, namespace: str) -> None:
    content = gzip.compress(os.urandom(9_000_000), 1)
    async with worker(nats_url, namespace, FakeProfiler(content)) as (bus, _):
        assert len(content) > bus.client.max_payload
        profile_id = await start(bus, namespace, 0.05)
        got = b""
        while len(got) < len(content):
            piece = await part(bus, namespace, profile_id, len(got))
            assert (piece.size_bytes, piece.steps) == (len(content), 7)
            got += piece.data
    assert got == content


async def test_a_second_is_refused_while_the_first_is_recorded_and_not_after(nats_url: str, namespace: str) -> None:
    profiler = FakeProfiler(b"x")
    async with worker(nats_url, namespace, profiler) as (bus, _):
        profile_id = await start(bus, namespace, 50)
        with pytest.raises(Overloaded, match=rf"decode d1 is being profiled already \(profile {profile_id}"):
            await start(bus, namespace, 50)
        profiler.over.set()
        assert (await part(bus, namespace, profile_id)).data == b"x"
        others = [profile_id]
        for _ in range(profiles.MAX_KEPT_PROFILES):
            others.append(await start(bus, namespace, 0.01))
            await part(bus, namespace, others[-1])
        assert (await part(bus, namespace, others[-2])).data == b"x", "the last but one is kept"
        with pytest.raises(Rejected, match=f"decode d1 has no profile '{profile_id}'"):
            await part(bus, namespace, profile_id)


async def test_one_that_is_not_ready_is_answered_before_the_caller_gives_up(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "READY_TIMEOUT_S", 0.05)
    async with worker(nats_url, namespace, FakeProfiler(b"x")) as (bus, _):
        profile_id = await start(bus, namespace, 20)
        assert (await part(bus, namespace, profile_id)).size_bytes is None


async def test_leaving_stops_the_recording_and_removes_the_files(nats_url: str, namespace: str) -> None:
    profiler = FakeProfiler(b"x")
    async with worker(nats_url, namespace, profiler) as (bus, kept):
        assert kept._home is None, "a worker that is never profiled leaves nothing when it is killed"
        await part(bus, namespace, await start(bus, namespace, 0.01))
        await start(bus, namespace, 50)
        assert kept._home is not None
        home = Path(kept._home.name)
        assert list(home.iterdir())
    assert profiler.stopped == 2
    assert not home.exists()


async def test_a_profile_that_is_refused_leaves_no_folder(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker with the mock engine refuses each profile, but when it was killed, a folder was left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    profiler = FakeProfiler(b"x", refusal=Rejected("nothing to record"))
    async with worker(nats_url, namespace, profiler) as (bus, _):
        with pytest.raises(Rejected, match="nothing to record"):
            await start(bus, namespace, 0.01)
        assert list(tmp_path.iterdir()) == []
        profiler.refusal = None
        first = await start(bus, namespace, 0.01)
        await part(bus, namespace, first)
        profiler.refusal = Rejected("nothing to record")
        with pytest.raises(Rejected, match="nothing to record"):
            await start(bus, namespace, 0.01)
        assert (await part(bus, namespace, first)).data == b"x", "a folder with profiles stays"


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan")])
async def test_a_time_out_of_bounds_is_refused(nats_url: str, namespace: str, seconds: float) -> None:
    async with worker(nats_url, namespace, FakeProfiler()) as (bus, _):
        with pytest.raises(Rejected, match="seconds must be above 0 and at most 60"):
            await start(bus, namespace, seconds)


async def test_a_full_disk_is_reported(nats_url: str, namespace: str) -> None:
    async with worker(nats_url, namespace, FakeProfiler(error=OSError(28, "No space left on device"))) as (bus, _):
        profile_id = await start(bus, namespace, 0.01)
        with pytest.raises(InvariantBroken, match=r"cannot be kept there: .*No space left"):
            await part(bus, namespace, profile_id)
