"""Clusters of three etcd or NATS servers, whose members tests kill and freeze; and a TCP proxy that can be shut."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

from components.certificates import Certificates
from components.permissions import ADMINISTRATOR
from services.local.accounts import GATEWAY, Accounts
from services.local.child_process import tethered
from services.local.free_ports import free_ports
from services.local.servers import ETCD, HOST, NATS, Kind, Site, _ask
from tests.waiting import PATIENCE_S, wait_until

MEMBERS: Final = 3
ELECTION_MS: Final = 1_000  # etcd grants no lease shorter than one and a half of these
CHUNK_BYTES: Final = 1 << 16
PASSWORD: Final = "p@ss/word"


@dataclass(slots=True)
class Member:
    """One server process of a cluster. Its ports and home survive restarts."""

    name: str
    home: Path
    port: int
    second_port: int  # etcd: for its peers. NATS: monitoring
    route_port: int  # NATS: for its peers
    accounts: Accounts = field(default_factory=lambda: Accounts(passwords={ADMINISTRATOR: PASSWORD}))
    popen: "subprocess.Popen[bytes] | None" = None

    def site(self) -> Site:
        return Site(self.name, self.home, self.port, self.second_port, self.accounts, is_monitored=True)

    @property
    def is_running(self) -> bool:
        """Also true if it is frozen."""
        return self.popen is not None and self.popen.poll() is None

    def freeze(self) -> None:
        assert self.popen is not None
        os.killpg(self.popen.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.popen is not None
        os.killpg(self.popen.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill and reap it, if it runs."""
        if self.popen is None:
            return
        if self.is_running:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(PATIENCE_S)


class ServerCluster(ABC):
    """Three members on free ports of this machine. `start` and `restart` belong in the main thread; see `tethered`."""

    kind: Kind

    def __init__(self, home: Path, accounts: Accounts | None = None) -> None:
        """With certificates in `accounts`, members and clients authenticate with TLS."""
        self.accounts = accounts or Accounts(passwords={ADMINISTRATOR: PASSWORD})
        self.members: list[Member] = []
        for i, (port, second, route) in enumerate(zip(*[iter(free_ports(3 * MEMBERS))] * 3, strict=True)):
            name = f"{self.kind.name}-{i}"
            self.members.append(Member(name, home / name, port, second, route, self.accounts))

    @property
    def url(self) -> str:
        """The client addresses of all members, as MESH_ETCD_URL and MESH_NATS_URL take them."""
        return ",".join(self.url_of(member) for member in self.members)

    def url_of(self, member: Member) -> str:
        scheme = self.kind.secure_scheme if self.accounts.are_secure else self.kind.scheme
        return f"{scheme}://{HOST}:{member.port}"

    def start(self, members: Sequence[Member] | None = None) -> None:
        """Start members, by default all that do not run, on their data; return when all answer."""
        started = [m for m in members or self.members if not m.is_running]
        for member in started:
            member.home.mkdir(parents=True, exist_ok=True)
            with (member.home.parent / f"{member.name}.log").open("ab") as log:
                member.popen = subprocess.Popen(
                    [*tethered(), *self._command(member)],
                    cwd=member.home,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        self.until_whole()

    def until_whole(self) -> None:
        """Wait until all members form one cluster; fail with their logs."""
        wait_until(lambda: all(map(self._answers, self.members)), lambda: f"a whole cluster:\n{self._logs()}")

    def thaw(self) -> None:
        """Continue every frozen member; return when all answer."""
        for member in self.members:
            if member.is_running:
                member.thaw()
        self.until_whole()

    def lose_data(self) -> None:
        """Remove the data of the members, which must not run."""
        assert not any(member.is_running for member in self.members)
        for member in self.members:
            shutil.rmtree(member.home)

    def close(self) -> None:
        """Kill all members and remove their data."""
        for member in self.members:
            member.kill()
            shutil.rmtree(member.home, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _command(self, member: Member) -> list[str]: ...

    @abstractmethod
    def _answers(self, member: Member) -> bool: ...

    def _logs(self) -> str:
        logs = (member.home.parent / f"{member.name}.log" for member in self.members)
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists())


class EtcdCluster(ServerCluster):
    """etcd elects a leader in one to two seconds; a lease may be as short as two seconds."""

    kind = ETCD

    def leader(self) -> Member:
        """Wait for a leader and return it."""
        leaders: list[Member] = []

        def is_led() -> bool:
            leaders[:] = filter(self._leads, self.members)
            return bool(leaders)

        wait_until(is_led, lambda: f"a leader:\n{self._logs()}")
        return leaders[0]

    def _leads(self, member: Member) -> bool:
        status = self._ask(member, "/v3/maintenance/status")
        return bool(status) and status.get("leader") == status["header"]["member_id"]

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def _command(self, member: Member) -> list[str]:
        scheme = "https" if self.accounts.are_secure else "http"
        peers = ",".join(f"{m.name}={scheme}://{HOST}:{m.second_port}" for m in self.members)
        return [  # of a repeated option etcd uses the last one
            *ETCD.command(member.site()),
            f"--initial-cluster={peers}",
            f"--election-timeout={ELECTION_MS}",
        ]

    def _answers(self, member: Member) -> bool:
        """A list of members is a linearizable read: it needs a leader."""
        listed = self._ask(member, "/v3/cluster/member/list")
        return listed is not None and len(listed["members"]) == MEMBERS

    def _ask(self, member: Member, path: str) -> Any:
        certificates = self.accounts.certificates
        context = Certificates(certificates[GATEWAY]).current().context if certificates else None
        return _get_json(member.port, path, context=context)


class NatsCluster(ServerCluster):
    """Without JetStream frontends store no responses: start them with MESH_FRONTEND_MAX_STORED_RESPONSES=0."""

    kind = NATS

    def __init__(self, home: Path, accounts: Accounts | None = None, *, jetstream: bool = False) -> None:
        super().__init__(home, accounts)
        self._jetstream = jetstream

    def url_of(self, member: Member) -> str:
        """Return a member's address, with user and password unless clients have certificates."""
        if self.accounts.are_secure:
            return super().url_of(member)
        return f"nats://{ADMINISTRATOR}:{quote(PASSWORD, safe='')}@{HOST}:{member.port}"

    def busiest(self) -> Member:
        """Return the member with the most clients. A client that has lost a server stays with the next one."""
        return max(self.members, key=lambda member: _get_json(member.second_port, "/connz", method="GET")["total"])

    def _command(self, member: Member) -> list[str]:
        command = NATS.command(member.site())
        config = member.home / "nats.conf"
        lines = config.read_text().splitlines()
        if not self._jetstream:
            lines = [line for line in lines if not line.startswith("jetstream")]
        routes = ", ".join(f'"nats://{HOST}:{m.route_port}"' for m in self.members if m is not member)
        lines.append(
            f'cluster {{ name: test, listen: "{HOST}:{member.route_port}", routes: [{routes}]{self._peers()} }}'
        )
        config.write_text("\n".join(lines))
        return command

    def _peers(self) -> str:
        """Return the settings of TLS between members. With `ca_file`, NATS demands their certificates."""
        if not self.accounts.are_secure:
            return ""
        files = self.accounts.certificates["nats"]
        paths = {"ca_file": files.ca, "cert_file": files.certificate, "key_file": files.key}
        return f", tls {{ {', '.join(f'{name}: {json.dumps(str(path))}' for name, path in paths.items())} }}"

    def _answers(self, member: Member) -> bool:
        routes = _get_json(member.second_port, "/routez", method="GET")
        return routes is not None and len({r["remote_id"] for r in routes["routes"]}) == MEMBERS - 1


def _get_json(port: int, path: str, method: str = "POST", context: ssl.SSLContext | None = None) -> Any:
    """Return the JSON answer, or None."""
    try:
        return json.loads(_ask(port, method, path, context))
    except (OSError, http.client.HTTPException, ValueError):
        return None


class Proxy:
    """Forwards TCP from a local port for each address of a comma-separated URL, in a thread."""

    def __init__(self, url: str) -> None:
        self._targets = [(parts.hostname, parts.port) for parts in map(urlsplit, url.split(","))]
        self._ports = free_ports(len(self._targets))
        self._scheme = urlsplit(url.split(",", maxsplit=1)[0]).scheme
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return ",".join(f"{self._scheme}://{HOST}:{port}" for port in self._ports)

    def open(self) -> None:
        self._run(self._open())

    def shut(self) -> None:
        """End all connections; new ones are refused."""
        self._run(self._shut())

    def __enter__(self) -> Self:
        self._thread.start()
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _open(self) -> None:
        for port, target in zip(self._ports, self._targets, strict=True):
            self._servers.append(await asyncio.start_server(partial(self._serve, target), HOST, port))

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0.01)

    async def _serve(self, target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(*target)
            self._writers.add(back)
            try:
                await asyncio.gather(_copied(reader, back), _copied(there, writer))
            finally:
                self._writers.discard(back)
                back.transport.abort()
        except OSError:
            pass  # the client sees its connection end
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of one direction. Raises: ConnectionResetError then, to end the other one."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError
