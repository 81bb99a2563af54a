"""Facts that `doctor` checks, about servers, instances and this machine. They are not judged here."""

import asyncio
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors

from components.credentials import EtcdAccess, NatsAccess, PageAccess
from components.discovery.etcd import CALL_TIMEOUT_S, DatabaseFull, etcd_client
from components.discovery.etcd_stubs import etcdrpc
from components.errors import MeshError
from components.http.fetch import fetch
from components.messaging.nats_errors import unreachable
from components.messaging.secure_client import SecureClient
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.urls import without_password
from services.inspect.mesh import Seen, heartbeat_ages_s, open_mesh

NATS_S: Final = 3.0
PAGE_S: Final = 2.0
NIXL_S: Final = 30.0  # a cold import
SHM: Final = Path("/dev/shm")  # noqa: S108  # looked at, not written to
SHM_MAKERS: Final = ("ucx", "nixl", "kvmesh", "mooncake", "torch_", "nccl")  # beginnings of file names
OLD_S: Final = 60.0  # a younger segment may be about to be mapped
SECOND_MS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Server:
    """An etcd member, or NATS."""

    url: str  # without a password
    error: str = ""  # empty: it works
    version: str = ""
    latency_ms: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    do: str = "start it, or set the right address and password; `inspect env` prints those of a local mesh"


@dataclass(frozen=True, slots=True)
class Segment:
    """A file in /dev/shm that no process of ours has mapped."""

    path: str
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class SharedMemory:
    total_bytes: int = 0
    free_bytes: int = 0
    left_over: Sequence[Segment] = ()


@dataclass(frozen=True, slots=True)
class Nixl:
    error: str = ""
    plugins: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    namespace: str
    host: str
    lease_ttl_s: float = 10.0
    etcd: Sequence[Server] = ()
    nats: Server | None = None
    seen: Sequence[Seen] = ()
    heartbeat_ages_s: Mapping[str, float] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)  # error by instance id; empty: its metrics page answers
    ports: Mapping[str, str] = field(default_factory=dict)  # error by instance id of a frontend
    shm: SharedMemory | None = None
    nixl: Nixl = Nixl()

    @property
    def servers_work(self) -> bool:
        """Return whether instances can be found; for that, etcd need not accept writes."""
        return self.nats is not None and not self.nats.error and any(one.facts or not one.error for one in self.etcd)


async def gather_facts(settings: MeshSettings) -> Facts:
    etcd, bus, nixl, shm = await asyncio.gather(
        asyncio.gather(
            *(
                asyncio.to_thread(_etcd_member, one.strip(), settings.etcd_access(), f"{settings.namespace}/doctor")
                for one in settings.etcd_url.split(",")
            )
        ),
        _nats(settings.nats_url, settings.nats_access("inspect"), settings.namespace),
        _nixl(),
        asyncio.to_thread(shared_memory),
    )
    here = socket.gethostname()
    facts = Facts(settings.namespace, here, settings.lease_ttl_s, etcd, bus, shm=shm, nixl=nixl)
    if not facts.servers_work:
        return facts
    async with open_mesh(settings) as mesh:
        seen = await mesh.snapshot(transport=True)
    records = [one.record for one in seen if one.record is not None]
    pages, ports = await asyncio.gather(
        _errors(
            {record.instance_id: record.metrics or record.http for record in records},
            partial(_page_error, access=settings.page_access()),
        ),
        _errors({record.instance_id: record.http for record in records if record.role == "frontend"}, _port_error),
    )
    return replace(facts, seen=seen, heartbeat_ages_s=heartbeat_ages_s(seen), pages=pages, ports=ports)


def _etcd_member(url: str, access: EtcdAccess, key: str) -> Server:
    """Read with a quorum and write `key`, because a full etcd can still be read."""
    began_s, shown, facts = time.monotonic(), without_password(url), {}
    try:
        with etcd_client(url, access) as client:
            status = etcdrpc.MaintenanceStub(client.channel).Status(etcdrpc.StatusRequest(), CALL_TIMEOUT_S)
            facts = {"db_bytes": status.dbSize, "is_leader": status.leader == status.header.member_id}
            client.put(key, "")
            client.delete(key)
    except DatabaseFull as exc:
        return Server(shown, exc.message, facts=facts, do="do so soon: until then no process can join the mesh")
    except (MeshError, WrongSettings) as exc:
        return Server(shown, exc.message)
    took_ms = (time.monotonic() - began_s) * SECOND_MS
    return Server(shown, "", status.version, took_ms, facts)


async def _nats(url: str, access: NatsAccess, namespace: str) -> Server:
    shown = without_password(url)
    try:
        client = SecureClient(url, access)
    except WrongSettings as exc:
        return Server(shown, str(exc))

    causes: list[Exception] = []  # `connect` tries a refused connection again until the timeout, which hides the cause

    async def keep(cause: Exception) -> None:
        causes.append(cause)

    try:
        async with asyncio.timeout(NATS_S):
            await client.connect(shown.split(","), allow_reconnect=False, error_cb=keep, **client.login_options())
    except (nats.errors.Error, OSError) as exc:
        return Server(shown, unreachable(url, causes[-1] if causes and isinstance(exc, TimeoutError) else exc))
    try:
        began_s = time.monotonic()
        await client.flush(timeout=NATS_S)
        took_ms = (time.monotonic() - began_s) * SECOND_MS
        facts: dict[str, Any] = {"max_payload": client.max_payload, "jetstream": ""}
        jetstream = client.jetstream(timeout=NATS_S)
        try:
            account = await jetstream.account_info()
            facts |= {"streams": account.streams, "stored_bytes": account.storage}
            with suppress(nats.errors.Error, TimeoutError):  # there is no stream, or rights of an earlier release
                responses = await jetstream.stream_info(f"{namespace}-responses")
                facts |= {
                    "is_cluster": bool(responses.cluster and responses.cluster.name),
                    "replicas": responses.config.num_replicas,
                }
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            facts["jetstream"] = str(exc) or type(exc).__name__
        return Server(
            shown, "", str(client.connected_server_version).strip("<>").removeprefix("nats server v"), took_ms, facts
        )
    except (nats.errors.Error, OSError, TimeoutError) as exc:
        return Server(shown, unreachable(url, exc))
    finally:
        await client.close()


async def _nixl() -> Nixl:
    """List NIXL's plugins in a separate process, because a library of a broken installation may crash it."""
    command = (sys.executable, "-m", "components.kv_transfer.list_plugins")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(NIXL_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return Nixl(f"it did not load in {NIXL_S:.0f} s")
    with suppress(ValueError):
        return Nixl(plugins=json.loads(out.decode().strip().splitlines()[-1]) if out.strip() else [])
    return Nixl(err.decode(errors="replace").strip().splitlines()[-1] if err.strip() else "it printed nothing")


async def _errors(urls: Mapping[str, str | None], error_of: Callable[[str], str]) -> dict[str, str]:
    given = {name: url for name, url in urls.items() if url}
    errors = await asyncio.gather(*(asyncio.to_thread(error_of, url) for url in given.values()))
    return dict(zip(given, errors, strict=True))


def _page_error(url: str, access: PageAccess) -> str:
    page = f"{url}/metrics"
    try:
        status = fetch(page, timeout_s=PAGE_S, headers=access.headers(), context=access.context(url)).status
    except OSError as exc:
        return f"{page}: {str(exc) or type(exc).__name__}"
    return "" if status == HTTPStatus.OK else f"{page}: HTTP {status}"


def _port_error(url: str) -> str:
    """Return why no connection can be opened. No request is sent, because the frontend may require TLS or a key."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=PAGE_S):
            return ""
    except OSError as exc:
        return f"{url}: {exc.strerror or exc}"


def shared_memory(folder: Path = SHM) -> SharedMemory | None:
    """Return None if there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
        entries = [(entry, entry.stat()) for entry in folder.iterdir() if entry.name.startswith(SHM_MAKERS)]
    except OSError:
        return None
    now_s, in_use = time.time(), _mapped_paths()
    left = [
        Segment(str(entry), about.st_size, now_s - about.st_mtime)
        for entry, about in entries
        if stat.S_ISREG(about.st_mode)
        and about.st_uid == os.getuid()  # others' processes cannot be read
        and now_s - about.st_mtime > OLD_S
        and str(entry) not in in_use
    ]
    return SharedMemory(usage.total, usage.free, left)


def _mapped_paths() -> set[str]:
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found |= {line.split(maxsplit=5)[-1] for line in lines if f" {SHM}/" in line}
    return found
