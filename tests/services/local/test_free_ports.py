"""Servers get ports that no outgoing connection can take while they are restarted."""

import socket
import sys
from pathlib import Path
from typing import Final

import pytest

from services.local import free_ports as module
from services.local.free_ports import FIRST, LAST, free_ports

OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_they_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(FIRST <= port < LAST for port in ports)
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


@pytest.mark.skipif(not OUTGOING.exists(), reason=f"{sys.platform} does not say which ports outgoing connections have")
def test_outgoing_connections_have_other_ports() -> None:
    assert int(OUTGOING.read_text().split()[0]) >= LAST


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports(2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        draws = iter([taken, taken, free])
        monkeypatch.setattr(module._draw, "randrange", lambda _first, _last: next(draws))
        assert free_ports(1) == [free]


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_has_none(host: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        free_ports(1, host)
