import asyncio
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest
from nats.js import JetStreamContext

from bench.processes import free_port
from components.errors import BackendUnavailable, MessageTooLarge
from components.messaging.connection import connect_bus
from components.messaging.records import NoJetStream, Records, RecordsConfig
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]
BOUNDS = RecordsConfig(records=3, bytes=1_000_000, age_s=60)


async def silent(*_: object, **__: object) -> None:
    """NATS does not answer."""
    raise nats.errors.TimeoutError


@pytest.fixture
def bare_nats(tmp_path: Path) -> Iterator[str]:
    """A NATS without JetStream."""
    port = free_port()
    server = Path(sysconfig.get_path("scripts")) / "nats-server"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([server, "-a", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_a_record_is_everybodys_until_it_is_deleted(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "one") as one, connect_bus(nats_url, "two") as two:
        here, there = await Records(one, namespace, BOUNDS).open(), await Records(two, namespace, BOUNDS).open()
        assert await there.get("a") is None
        await here.put("a", b"first")
        await here.put("a", b"second")
        assert await there.get("a") == b"second"
        await there.delete("a")
        assert await here.get("a") is None
        await there.delete("a")


async def test_the_oldest_goes_first(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "one") as bus:
        records = await Records(bus, namespace, BOUNDS).open()
        for key in "abcd":
            await records.put(key, key.encode())
        assert [await records.get(key) for key in "abcd"] == [None, b"b", b"c", b"d"]
        records = await Records(bus, namespace, RecordsConfig(records=3, bytes=1_000_000, age_s=0.1)).open()
        async with asyncio.timeout(PATIENCE_S):
            while await records.get("d") is not None:
                await asyncio.sleep(0.02)
        with pytest.raises(MessageTooLarge):
            await records.put("e", bytes(bus.client.max_payload))


async def test_a_record_that_was_deleted_or_replaced_is_not_stored_again(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "one") as one, connect_bus(nats_url, "two") as two:
        here, there = await Records(one, namespace, BOUNDS).open(), await Records(two, namespace, BOUNDS).open()
        first = await here.put("a", b"first")
        second = await here.put("a", b"second", first)
        assert second is not None
        assert await here.put("a", b"third", first) is None
        assert await there.get("a") == b"second"
        await there.delete("a")
        assert await here.put("a", b"third", second) is None
        assert await there.get("a") is None


async def test_a_record_is_stored_in_the_stream_that_another_process_made_anew(nats_url: str, namespace: str) -> None:
    """Revisions of the lost stream are larger than those of the new one."""
    async with connect_bus(nats_url, "one") as one, connect_bus(nats_url, "two") as two:
        await Records(one, f"{namespace}.other", BOUNDS).open()
        here = await Records(one, namespace, BOUNDS).open()
        for _ in range(3):
            revision = await here.put("a", b"first")
        await one.client.jetstream().delete_stream(namespace)
        there = await Records(two, namespace, BOUNDS).open()
        await there.put("b", b"other")
        assert await here.put("a", b"second", revision) == 2
        assert await there.get("a") == b"second"


async def test_two_names_share_nothing(nats_url: str, namespace: str) -> None:
    async with connect_bus(nats_url, "one") as bus:
        one, two = (
            await Records(bus, f"{namespace}.x", BOUNDS).open(),
            await Records(bus, f"{namespace}.y", BOUNDS).open(),
        )
        await one.put("a", b"x")
        assert await two.get("a") is None


async def test_a_nats_without_jetstream_keeps_nothing(bare_nats: str) -> None:
    async with connect_bus(bare_nats, "one") as bus:
        with pytest.raises(NoJetStream, match="no JetStream"):
            await Records(bus, "any", BOUNDS).open()


@pytest.mark.parametrize("lost", ["get", "put", "delete"])
async def test_records_that_nats_has_lost_are_gone_and_new_ones_are_stored(
    nats_url: str, namespace: str, lost: str
) -> None:
    """No response was stored until the frontends were restarted."""
    async with connect_bus(nats_url, "one") as bus:
        # With a second stream NATS keeps the directory of all streams, which it would else remove and miss at once.
        await Records(bus, f"{namespace}.other", BOUNDS).open()
        records = await Records(bus, namespace, BOUNDS).open()
        await records.put("a", b"before")
        # Once for each name: NATS restores the records if a stream is deleted again while it still removes its files.
        await bus.client.jetstream().delete_stream(namespace)
        match lost:
            case "get":
                assert await records.get("a") is None
            case "put":
                await records.put("b", b"after")
                assert await records.get("b") == b"after"
            case "delete":
                await records.delete("a")
        assert await records.get("a") is None


async def test_a_stream_that_was_not_made_in_time_is_made_later(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream was only slow; a user without the right to make streams gets no answer either."""

    async with connect_bus(nats_url, "one") as bus:
        await Records(bus, f"{namespace}.other", BOUNDS).open()
        records = await Records(bus, namespace, BOUNDS).open()
        await bus.client.jetstream().delete_stream(namespace)
        with monkeypatch.context() as slow:
            slow.setattr(JetStreamContext, "add_stream", silent)
            with pytest.raises(BackendUnavailable, match="response_stream"):
                await records.put("a", b"x")
        with pytest.raises(BackendUnavailable, match="response_stream"):
            await records.put("a", b"x")
        monkeypatch.setattr("components.messaging.records.CREATE_RETRY_PAUSE_S", 0.0)
        await records.put("a", b"x")
        assert await records.get("a") == b"x"


async def test_jetstreams_own_words_reach_the_operator(nats_url: str, namespace: str) -> None:
    """A full JetStream was reported as an unreachable NATS."""
    too_much = RecordsConfig(records=3, bytes=2**62, age_s=60)
    async with connect_bus(nats_url, "one") as bus:
        with pytest.raises(BackendUnavailable, match="cannot keep records: insufficient storage"):
            await Records(bus, namespace, too_much).open()


async def test_a_nats_that_does_not_answer_is_away(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of a stored response got the error of its own time limit, and no line named the cause."""

    async with connect_bus(nats_url, "one") as bus:
        records = await Records(bus, namespace, BOUNDS).open()
        for name in ("publish", "get_last_msg", "purge_stream"):
            monkeypatch.setattr(JetStreamContext, name, silent)
        for call in (records.put("a", b"x"), records.get("a"), records.delete("a")):
            with pytest.raises(BackendUnavailable, match=r"does not answer.*full disk.*restart NATS"):
                await call


async def test_a_task_that_is_cancelled_while_it_opens_records_ends(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's wait_for lost a Ctrl-C that came together with JetStream's answer."""
    asked = asyncio.Event()
    real = JetStreamContext.stream_info

    async def forgets(*arguments: object) -> object:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await real(*arguments)

    monkeypatch.setattr(JetStreamContext, "stream_info", forgets)
    async with connect_bus(nats_url, "one") as bus:
        task = asyncio.create_task(Records(bus, namespace, BOUNDS).open())
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled()


async def test_a_call_that_nats_py_cancels_itself_finds_no_jetstream(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(JetStreamContext, "stream_info", cancelled)
    async with connect_bus(nats_url, "one") as bus:
        with pytest.raises(BackendUnavailable):
            await Records(bus, namespace, BOUNDS).open()


async def test_records_that_could_not_be_opened_work_as_soon_as_nats_answers(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend that started while JetStream was down stored nothing until it was restarted."""

    async with connect_bus(nats_url, "one") as bus:
        records = Records(bus, namespace, BOUNDS)
        with monkeypatch.context() as down:
            down.setattr(JetStreamContext, "stream_info", silent)
            with pytest.raises(BackendUnavailable, match="does not answer"):
                await records.open()
        await records.put("a", b"x")
        assert await records.get("a") == b"x"


async def test_a_stream_keeps_its_configuration_if_nats_refuses_another_one(
    nats_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No response was stored until the frontend was restarted with other settings."""
    async with connect_bus(nats_url, "one") as bus:
        await (await Records(bus, namespace, BOUNDS).open()).put("a", b"x")
        records = await Records(bus, namespace, replace(BOUNDS, replicas=3)).open()
        [warning] = [one for one in caplog.records if "has other settings" in one.message]
        assert "replicas > 1 not supported in non-clustered mode" in warning.__dict__["cause"]
        assert await records.get("a") == b"x"
