import asyncio
from types import SimpleNamespace

import pytest

from components.messaging import bus as bus_module
from components.messaging import connection
from components.messaging.bus import MAX_PINGS, PING_EVERY_S, Bus
from components.messaging.connection import _ConnectionReports


def test_contact_is_as_old_as_the_pings_without_an_answer_and_then_as_the_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    for module in (bus_module, connection):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    client = SimpleNamespace(is_connected=True, _pings_outstanding=0, new_inbox=lambda: "inbox", _nuid=None)
    bus = Bus(client, "nats://127.0.0.1:4222")
    reports = _ConnectionReports("nats://127.0.0.1:4222")
    reports.bus = bus
    asyncio.run(reports.on_connected())
    assert bus.contact_age_s() == 0
    client._pings_outstanding = 2
    assert bus.contact_age_s() == 2 * PING_EVERY_S
    client.is_connected = False
    asyncio.run(reports.on_disconnected())
    now_s += 10
    asyncio.run(reports.on_disconnected())  # a failed attempt to reconnect is the same outage
    assert bus.contact_age_s() == 10 + MAX_PINGS * PING_EVERY_S
