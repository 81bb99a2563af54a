"""Stored responses on a NATS whose users have rights: the administrator makes their stream."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from components.credentials import NatsAccess
from components.errors import BackendUnavailable, UnknownResponse
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.messaging.records import Records
from services.frontend.config import FrontendSettings
from services.frontend.response_stream import make_stream
from services.frontend.stored import open_stored
from services.local.accounts import Accounts
from services.local.servers import NATS, Server, running
from tests.conftest import REPO
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

NAMESPACE: Final = "mesh"
COMMAND: Final = "python -m services.frontend.response_stream"


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(NATS, tmp_path, accounts=Accounts.make(NAMESPACE, 1)) as server:
        yield server


@pytest.fixture
async def bus(nats: Server) -> AsyncIterator[Bus]:
    """A frontend's."""
    async with connect_bus(nats.url_of("frontend-0"), "f", NatsAccess(inbox=f"_INBOX.{NAMESPACE}.frontend-0")) as bus:
        yield bus


def settings_of(nats: Server, **more: int) -> FrontendSettings:
    return FrontendSettings(nats_url=nats.url, namespace=NAMESPACE, **more)


async def test_a_frontend_that_finds_none_and_may_make_none_names_the_command_and_stores_once_it_was_run(
    nats: Server, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    stored = await open_stored(bus, settings_of(nats), "subject")
    assert stored is not None
    [said] = [one for one in caplog.records if one.message == "responses cannot be stored yet"]
    assert COMMAND in said.__dict__["cause"]
    await make_stream(settings_of(nats))
    with pytest.raises(UnknownResponse):
        await stored.get("resp_" + "0" * 32, b"key")


async def test_the_command_makes_it_and_a_frontend_uses_it_within_its_rights(
    nats: Server, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MESH_")}
    env |= {"MESH_NATS_URL": nats.url, "MESH_NAMESPACE": NAMESPACE}
    subprocess.run([sys.executable, *COMMAND.split()[1:]], cwd=REPO, env=env, check=True, timeout=PATIENCE_S)
    records = await Records(bus, f"{NAMESPACE}.responses", settings_of(nats).stored_config).open()
    large = os.urandom(bus.client.max_payload - 1024)  # NATS returns it in base64, a third larger
    await records.put("large", large)
    await records.put("a", b"x")
    assert (await records.get("large"), await records.get("a")) == (large, b"x")
    await records.delete("a")
    assert await records.get("a") is None
    assert [one.message for one in caplog.records if one.levelname != "INFO"] == []


async def test_other_bounds_are_the_administrators_to_give(
    nats: Server, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    await make_stream(settings_of(nats))
    other = settings_of(nats, max_stored_responses=5)
    records = await Records(bus, f"{NAMESPACE}.responses", other.stored_config).open()
    [said] = [one for one in caplog.records if "other settings" in one.message]
    assert COMMAND in said.__dict__["cause"]
    await records.put("a", b"x")
    caplog.clear()
    await make_stream(other)
    records = await Records(bus, f"{NAMESPACE}.responses", other.stored_config).open()
    assert await records.get("a") == b"x"
    assert not caplog.records


async def test_a_lost_stream_is_missed_until_the_administrator_makes_it_again(nats: Server, bus: Bus) -> None:
    await make_stream(settings_of(nats))
    records = await Records(bus, f"{NAMESPACE}.responses", settings_of(nats).stored_config).open()
    await records.put("a", b"x")
    async with connect_bus(nats.url, "root") as root:
        await root.client.jetstream().delete_stream(f"{NAMESPACE}-responses")
    for call in (records.get("a"), records.put("a", b"y"), records.get("a")):
        with pytest.raises(BackendUnavailable, match=COMMAND):
            await call
    await make_stream(settings_of(nats))
    assert await records.get("a") is None
    await records.put("a", b"z")
    assert await records.get("a") == b"z"


async def test_a_frontend_makes_its_own_where_users_have_no_rights(nats_url: str, namespace: str) -> None:
    settings = FrontendSettings(nats_url=nats_url, namespace=namespace, stored_responses_bytes=1_000_000)
    async with connect_bus(nats_url, "f") as bus:
        assert await open_stored(bus, settings, "subject") is not None
