"""A registry and a real etcd: TLS, users by certificate and by file, and files that change."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from components.certificates import Certificates, TlsFiles
from components.credentials import ETCD_LOGIN, EtcdAccess, login_file
from components.discovery.etcd import etcd_client
from components.discovery.registry import Registration, Registry, join_registry
from components.errors import BackendUnavailable
from components.permissions import ADMINISTRATOR
from components.startup import WrongSettings
from services.local.accounts import GATEWAY, Accounts
from services.local.authority import NAMES_OF_THIS_MACHINE, Authority
from services.local.servers import ETCD, Server, running
from tests.components.discovery.records import record
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]
NAMESPACE, TTL_S = "mesh", 2.0
LONG_TTL_S = 10.0  # a process that stalls for some seconds keeps its record


@asynccontextmanager
async def etcd(home: Path, *, secure: bool = True) -> AsyncIterator[tuple[Server, Accounts]]:
    accounts = Accounts.make(NAMESPACE, 1, home / "tls" if secure else None)
    async with running(ETCD, home, accounts=accounts) as server:
        yield server, accounts


def identity(files: TlsFiles) -> EtcdAccess:
    return EtcdAccess(Certificates(files))


def reason(url: str, access: EtcdAccess) -> str:
    with pytest.raises(BackendUnavailable) as raised, etcd_client(url, access):
        pass
    return raised.value.message


async def seen_by(registry: Registry, instance_id: str) -> None:
    await until(lambda: registry.book.find("decode", instance_id) is not None)


async def test_a_registry_registers_and_watches_over_tls_with_the_rights_of_its_role(tmp_path: Path) -> None:
    async with etcd(tmp_path) as (server, accounts):
        decode, frontend = (identity(accounts.certificates[user]) for user in ("decode", "frontend-0"))
        mine = Registration("d1")
        async with (
            join_registry(server.url, NAMESPACE, TTL_S, decode) as registry,
            join_registry(server.url, NAMESPACE, TTL_S, frontend) as other,
            registry.advertise(mine, lambda epoch: record("d1", epoch)),
        ):
            await seen_by(other, "d1")
            leased_until_s = mine.leased_until_s
            await until(lambda: mine.leased_until_s > leased_until_s, "the lease is renewed")


async def test_strangers_and_plain_text_are_refused(tmp_path: Path) -> None:
    async with etcd(tmp_path) as (server, accounts):
        mine = accounts.certificates["decode"]
        other = Authority(tmp_path / "other").issue("decode")
        for access in (
            identity(TlsFiles(ca=mine.ca)),  # sends no certificate
            identity(TlsFiles(ca=mine.ca, certificate=other.certificate, key=other.key)),
            identity(TlsFiles(ca=other.ca, certificate=mine.certificate, key=mine.key)),  # does not trust etcd's
        ):
            assert "do not agree on TLS" in await asyncio.to_thread(reason, server.url, access)
        plain = server.url.replace("https", "http")
        assert "cannot be reached" in await asyncio.to_thread(reason, plain, EtcdAccess())


async def test_one_of_several_members_is_enough(tmp_path: Path) -> None:
    async with etcd(tmp_path) as (server, accounts):
        access = identity(accounts.certificates[ADMINISTRATOR])
        urls = f"https://127.0.0.1:1,{server.url}"

        def used() -> bytes:
            with etcd_client(urls, access) as client:
                client.put("a", "b")
                return bytes(client.get("a")[0])

        assert await asyncio.to_thread(used) == b"b"


async def test_a_login_in_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "login"
    async with etcd(tmp_path, secure=False) as (server, accounts):
        file.write_text("decode:wrong")
        access = EtcdAccess(login=login_file(file, ETCD_LOGIN))
        bare = f"http://{server.url.rpartition('@')[2]}"
        assert "MESH_ETCD_LOGIN_FILE" in await asyncio.to_thread(reason, bare, access)
        file.write_text(f"decode:{accounts.passwords['decode']}")
        async with asyncio.timeout(PATIENCE_S), join_registry(bare, NAMESPACE, TTL_S, access):
            pass


async def test_renewed_certificates_are_used_and_the_record_stays(tmp_path: Path) -> None:
    async with etcd(tmp_path) as (server, accounts):
        access = identity(accounts.certificates["decode"])
        mine = Registration("d1")
        async with (
            join_registry(server.url, NAMESPACE, LONG_TTL_S, access) as registry,
            registry.advertise(mine, lambda epoch: record("d1", epoch)),
        ):
            await seen_by(registry, "d1")
            left: list[object] = []
            registry.book.subscribe(lambda _before, after: left.append(after))
            authority = Authority(tmp_path / "tls")  # replaces the earlier one
            authority.issue("etcd", NAMES_OF_THIS_MACHINE)
            authority.issue("decode")
            authority.issue(GATEWAY, is_user=False)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGTERM)
            await server.process.wait()
            await server.restart()
            for _ in range(2):  # the lease is renewed and renewed with the new certificate
                before = mine.leased_until_s
                await until(lambda: registry.connected and mine.leased_until_s > before)  # noqa: B023
            assert None not in left


async def test_a_wrong_file_ends_the_start_with_its_name(tmp_path: Path) -> None:
    """In a thread the error would only be logged, and the process would wait forever."""
    files = TlsFiles(ca=tmp_path / "ca.pem")
    with pytest.raises(WrongSettings, match=r"MESH_TLS__CA .*/ca\.pem: No such file"):
        async with join_registry("https://127.0.0.1:1", NAMESPACE, TTL_S, identity(files)):
            pass


async def test_addresses_with_and_without_tls_are_not_mixed() -> None:
    with pytest.raises(WrongSettings, match=r"use https:// for all \(MESH_ETCD_URL\)"):
        async with join_registry("https://a:1,http://b:1", NAMESPACE, TTL_S):
            pass
