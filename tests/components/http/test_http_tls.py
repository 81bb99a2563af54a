"""TLS connections on real sockets: unfinished handshakes count as connections, and end."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from components.http.limits import ClientLimits, Closed
from components.http.tls import Tls
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from tests.components.http.served import GET, LIMITS, Served, served
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

PEMS: Final = Path(__file__).parents[2] / "services/frontend"
CERTIFICATE: Final = Tls(str(PEMS / "localhost.cert.pem"), str(PEMS / "localhost.key.pem"))
MAX_CONNECTIONS: Final = 256


@pytest.fixture(scope="session", params=[True, False], ids=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@asynccontextmanager
async def silent(server: Served, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open `count` silent TCP connections."""
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            readers.append(reader)
        yield readers


async def test_silent_handshakes_hold_up_no_new_client() -> None:
    """490 silent connections used all 512 files of a process for a minute."""
    async with (
        served(
            ClientLimits(handshake_s=1000.0, check_every_s=0.02, connections=MAX_CONNECTIONS), CERTIFICATE
        ) as server,
        silent(server, 490),
    ):
        for _ in range(3):
            await server.answers()
        assert server.closed(Closed.TOO_MANY) >= 490 - MAX_CONNECTIONS


async def test_a_handshake_that_does_not_end_is_given_up() -> None:
    async with served(replace(LIMITS, handshake_s=1.0), CERTIFICATE) as server, silent(server, 3) as readers:
        async with asyncio.timeout(PATIENCE_S):
            for reader in readers:
                assert await reader.read() == b""
        assert server.closed(Closed.HANDSHAKE_LATE) == 3
        await server.answers()


async def test_handshakes_are_closed_before_connections_that_are_idle() -> None:
    async with served(ClientLimits(connections=20), CERTIFICATE) as server, server.client() as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n0")
        async with silent(server, 100):
            await server.answers()
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


async def test_connections_that_are_idle_are_closed_where_no_handshake_is_under_way() -> None:
    async with served(ClientLimits(connections=20), CERTIFICATE) as server, AsyncExitStack() as stack:
        for _ in range(60):
            await stack.enter_async_context(server.client())
        await server.until_closed(Closed.TOO_MANY, 40)
        await server.answers()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\0" * 1000])
async def test_what_is_no_tls_is_closed_and_logs_nothing(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(replace(LIMITS, handshake_s=1.0), CERTIFICATE) as server, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        writer.write_eof()
        assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        await server.answers()
    assert not caplog.records


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered() -> None:
    """Its bytes arrive before the protocol that reads them exists."""
    async with served(ClientLimits(handshake_s=1000.0), CERTIFICATE) as server:
        sent = subprocess.Popen(
            ["openssl", "s_client", "-quiet", "-connect", f"127.0.0.1:{server.port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            out, _ = await asyncio.to_thread(
                sent.communicate, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), PATIENCE_S
            )
        finally:
            sent.kill()
        assert out.startswith(b"HTTP/1.1 200")


async def test_an_answer_before_the_end_of_its_body_can_be_read() -> None:
    head = b"POST /refused HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9999999\r\n\r\n"
    async with served(replace(LIMITS, body_s=1000.0), CERTIFICATE) as server, server.client() as (reader, writer):
        async with asyncio.timeout(PATIENCE_S):
            writer.write(head + b"x" * 2_000_000)
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


async def test_a_stop_ends_handshakes_that_are_under_way() -> None:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        async with served(replace(LIMITS, handshake_s=1000.0), CERTIFICATE) as server:
            readers = await stack.enter_async_context(silent(server, 5))
            await asyncio.sleep(0.05)
        await asyncio.gather(*(reader.read() for reader in readers), return_exceptions=True)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "tls-handshake"]


async def test_only_versions_that_are_safe_are_spoken() -> None:
    async with served(tls=CERTIFICATE) as server:
        old = ssl.create_default_context(cafile=CERTIFICATE.certificate)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=old, server_hostname="localhost")


async def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_live_on(tmp_path: Path) -> None:
    old = Authority(tmp_path).issue("frontend", NAMES_OF_THIS_MACHINE)
    trusted = (tmp_path / "ca.pem").read_text()
    async with served(tls=Tls(str(old.certificate), str(old.key))) as server:
        reader, writer = await connected(server, trusted)
        Authority(tmp_path).issue("frontend", NAMES_OF_THIS_MACHINE)  # of another authority, in the same files
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(server, trusted)
        for one in ((reader, writer), await connected(server, (tmp_path / "ca.pem").read_text())):
            one[1].write(GET)
            assert (await one[0].readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
            one[1].close()


async def test_a_certificate_that_cannot_be_used_leaves_the_earlier_one_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path).issue("frontend", NAMES_OF_THIS_MACHINE)
    trusted = (tmp_path / "ca.pem").read_text()
    async with served(tls=Tls(str(files.certificate), str(files.key))) as server:
        (tmp_path / "frontend.pem").write_text("half a file")
        for _ in range(2):
            _, writer = await connected(server, trusted)
            writer.close()
    assert [record.message for record in caplog.records] == ["changed file not used, the earlier one stays in use"]


async def connected(server: Served, trusted: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cadata=trusted)
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="localhost")
