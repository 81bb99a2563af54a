"""A bus and a real NATS server: TLS, each kind of login, and files that change."""

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from components.certificates import Certificates, TlsFiles
from components.credentials import NATS_LOGIN, NatsAccess, _base32, credentials_file, login_file, nkey_file
from components.messaging.bus import Bus
from components.messaging.connection import connect_bus
from components.startup import WrongSettings
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from services.local.child_process import kill
from services.local.servers import NATS, Server, Site, running
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

USER, ACCOUNT, OPERATOR, SEED = (kind << 3 for kind in (20, 0, 14, 18))


def tls_block(files: TlsFiles, *more: str) -> str:
    parts = [f'cert_file: "{files.certificate}"', f'key_file: "{files.key}"', f'ca_file: "{files.ca}"', *more]
    return f"tls {{ {', '.join(parts)} }}\n"


@asynccontextmanager
async def nats(home: Path, *config: str, tls: TlsFiles | None = None, mutual: bool = True) -> AsyncIterator[Server]:
    """Run a server. `config` replaces its users."""

    def command(site: Site) -> list[str]:
        given = NATS.command(site)
        block = "" if tls is None else tls_block(tls, *(["verify: true"] if mutual else []))
        kept = [
            line
            for line in Path(given[-1]).read_text().splitlines()
            if line.startswith(("server_", "listen", "http", "max_"))
        ]
        Path(given[-1]).write_text("\n".join([*kept, block, *config, ""]))
        return given

    async with running(replace(NATS, command=command), home) as server:
        yield server


def address(server: Server, scheme: str = "tls") -> str:
    return f"{scheme}://{server.url.rpartition('@')[2]}"


def reload(server: Server, *replacements: tuple[str, str]) -> None:
    assert server.process is not None
    config = server.home / "nats.conf"
    text = config.read_text()
    for old, new in replacements:
        text = text.replace(old, new)
    config.write_text(text)
    os.kill(server.process.pid, signal.SIGHUP)


async def answers(bus: Bus) -> bool:
    """Whether a message to ourselves arrives."""
    arrived = asyncio.Event()

    async def receive(_message: object) -> None:
        arrived.set()

    async with asyncio.timeout(PATIENCE_S), bus.subscription("ping", receive):
        await bus.client.publish("ping")
        await arrived.wait()
    return True


async def refused(url: str, access: NatsAccess, caplog: pytest.LogCaptureFixture) -> str:
    """Return the reason that a bus logs for not connecting."""
    caplog.clear()
    trying = asyncio.create_task(_connected(url, access))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for record in caplog.records:
                    if record.message == "NATS cannot be reached, trying again":
                        return str(record.__dict__["reason"])
                assert not trying.done(), "it has connected"
                await asyncio.sleep(0.02)
    finally:
        trying.cancel()
        await asyncio.wait({trying})


async def _connected(url: str, access: NatsAccess) -> None:
    async with connect_bus(url, "test", access):
        pass


def identity(files: TlsFiles) -> NatsAccess:
    return NatsAccess(Certificates(files))


async def test_both_sides_show_certificates_and_others_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, stranger = Authority(tmp_path / "tls"), Authority(tmp_path / "other")
    mine = authority.issue("decode")
    async with nats(tmp_path, tls=authority.issue("nats", NAMES_OF_THIS_MACHINE)) as server:
        url = address(server)
        async with connect_bus(url, "test", identity(mine)) as bus:
            assert await answers(bus)
        of_stranger = stranger.issue("decode")
        said = await refused(url, identity(TlsFiles(ca=of_stranger.ca)), caplog)
        assert "do not agree on TLS" in said
        assert "MESH_TLS__CA must have signed" in said
        for access in (
            identity(TlsFiles(ca=mine.ca)),
            identity(TlsFiles(ca=mine.ca, certificate=of_stranger.certificate, key=of_stranger.key)),
        ):
            assert "MESH_TLS__CERTIFICATE must be one that" in await refused(url, access, caplog)


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path / "tls")
    async with nats(tmp_path, tls=authority.issue("nats", ["elsewhere.example"])) as server:
        said = await refused(address(server), identity(authority.issue("decode")), caplog)
        assert "IP address mismatch" in said


async def test_an_address_with_tls_is_never_spoken_to_in_plain_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-py sends the login in plain text if the server, or a man in the middle, offers no TLS."""
    got = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        writer.write(b'INFO {"server_id":"X","max_payload":1048576,"auth_required":true}\r\n')
        got += await reader.read(65536)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        said = await refused(f"tls://decode:secret@127.0.0.1:{port}", NatsAccess(), caplog)
    assert "the server offers no TLS" in said
    assert got == b""


async def test_a_plain_address_of_a_server_with_tls_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Authority(tmp_path / "tls").issue("nats", NAMES_OF_THIS_MACHINE)
    async with nats(tmp_path, tls=tls) as server:
        assert "do not agree on TLS" in await refused(address(server, "nats"), NatsAccess(), caplog)


@pytest.mark.parametrize("url", ["tls://a:1,nats://b:1", "tls://a:1,b:1", "http://a:1"])
async def test_addresses_of_other_kinds_are_refused(url: str) -> None:
    with pytest.raises(WrongSettings, match="MESH_NATS_URL"):
        await _connected(url, NatsAccess())


async def test_one_of_several_servers_is_enough(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    async with nats(tmp_path, tls=authority.issue("nats", NAMES_OF_THIS_MACHINE)) as server:
        url = f"tls://127.0.0.1:1,{address(server)}"
        async with connect_bus(url, "test", identity(authority.issue("decode"))) as bus:
            assert await answers(bus)


async def test_a_renewed_login_is_used_after_nats_has_refused_the_old_one(tmp_path: Path) -> None:
    """nats-py closes itself for good when its user is refused."""
    file = tmp_path / "login"
    file.write_text("decode:old-one")
    users = 'authorization {{ users: [ {{ user: decode, password: "{}" }} ] }}'
    async with nats(tmp_path, users.format("old-one")) as server:
        access = NatsAccess(login=login_file(file, NATS_LOGIN))
        async with connect_bus(address(server, "nats"), "test", access) as bus:
            assert await answers(bus)
            reload(server, ("old-one", "new-one"))
            await until(lambda: not bus.is_connected)
            file.write_text("decode:new-one")
            await until(lambda: bus.is_connected)
            assert await answers(bus)


async def test_renewed_certificates_are_used_by_new_connections_and_old_ones_live_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    mine = authority.issue("decode")
    async with (
        nats(tmp_path, tls=authority.issue("nats", NAMES_OF_THIS_MACHINE)) as server,
        connect_bus(address(server), "test", identity(mine)) as bus,
    ):
        assert await answers(bus)
        other = Authority(tmp_path / "tls")  # replaces all files
        other.issue("nats", NAMES_OF_THIS_MACHINE)
        other.issue("decode")
        reload(server)
        assert await answers(bus), "a connection outlives the certificates it began with"
        assert bus.client.stats["reconnects"] == 0
        assert server.process is not None
        await kill(server.process)
        await until(lambda: not bus.is_connected)
        await server.restart()
        await until(lambda: bus.is_connected)
        assert await answers(bus)


async def test_certificates_of_both_authorities_are_accepted_while_one_replaces_the_other(tmp_path: Path) -> None:
    """Both have one name: OpenSSL took the first for the issuer, and refused every certificate of the second."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    both = tmp_path / "both.pem"
    both.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
    server_files = new.issue("nats", NAMES_OF_THIS_MACHINE).model_copy(update={"ca": both})
    async with nats(tmp_path, tls=server_files) as server:
        for authority in (old, new):
            mine = authority.issue("decode").model_copy(update={"ca": both})
            async with connect_bus(address(server), "test", identity(mine)) as bus:
                assert await answers(bus)


async def test_a_key_in_a_file_proves_a_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    public, seed = key_pair(USER)
    file = tmp_path / "seed"
    file.write_text(seed)
    async with nats(tmp_path, f"authorization {{ users: [ {{ nkey: {public} }} ] }}") as server:
        async with connect_bus(address(server, "nats"), "test", NatsAccess(key=nkey_file(file))) as bus:
            assert await answers(bus)
        file.write_text(key_pair(USER)[1])
        said = await refused(address(server, "nats"), NatsAccess(key=nkey_file(file)), caplog)
        assert "refuses this login" in said


async def test_credentials_of_an_operator_prove_a_user(tmp_path: Path) -> None:
    operator, operator_seed = key_pair(OPERATOR)
    account, account_seed = key_pair(ACCOUNT)
    user, user_seed = key_pair(USER)
    operator_jwt = token(operator_seed, operator, operator, {"type": "operator", "version": 2})
    limits = {
        "subs": -1,
        "data": -1,
        "payload": -1,
        "conn": -1,
        "leaf": -1,
        "imports": -1,
        "exports": -1,
        "wildcards": True,
    }
    account_jwt = token(operator_seed, operator, account, {"type": "account", "version": 2, "limits": limits})
    user_jwt = token(account_seed, account, user, {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    )
    config = f"operator: {operator_jwt}\nresolver: MEMORY\nresolver_preload: {{ {account}: {account_jwt} }}"
    async with nats(tmp_path, config) as server:
        access = NatsAccess(credentials=credentials_file(file))
        async with connect_bus(address(server, "nats"), "test", access) as bus:
            assert await answers(bus)


def key_pair(kind: int) -> tuple[str, str]:
    """Return a public key and its seed."""
    private = Ed25519PrivateKey.generate()
    raw = private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    head = bytes([SEED | kind >> 5, (kind & 31) << 3])
    return _base32(bytes([kind]) + public), _base32(head + raw)


def token(seed: str, issuer: str, subject: str, claims: dict[str, object]) -> str:
    """Make a NATS JWT, signed with `seed`."""

    def part(value: object) -> str:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    body = {"jti": "x", "iat": int(time.time()), "iss": issuer, "sub": subject, "name": "test", "nats": claims}
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    return f"{text}.{part(Ed25519PrivateKey.from_private_bytes(raw[2:-2]).sign(text.encode()))}"
