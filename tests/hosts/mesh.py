"""A mesh over several hosts: etcd, NATS and bootstrap on one, each other service on its own."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from components.permissions import ADMINISTRATOR
from services.local.accounts import Accounts
from services.local.child_process import tethered
from services.local.servers import MAX_PAYLOAD_BYTES, Site, _etcd_command, _nats_command
from tests.hosts.hosts import DEVICE, IP, Host, Hosts
from tests.mesh.harness import MeshProcesses, Worker
from tests.waiting import PATIENCE_S, wait_until

NAMES: Final = ("core", "frontend", "prefill", "decode", "decode2", "client")
FAULTY: Final = ("core", "frontend", "prefill", "decode")
ETCD_PORT: Final = 2379
NATS_PORT: Final = 4222
PASSWORD: Final = "hosts"  # of NATS


@dataclass(slots=True)
class HostMesh(MeshProcesses):
    """Processes on hosts, by default on the host of their role."""

    hosts: Hosts = field(kw_only=True)
    _next: Host = field(init=False)

    def start_on(self, host: str, role: str, **env: str) -> Worker:
        self._next = self.hosts[host]
        here = self._next.address
        # Without UCX_TLS, UCX uses shared memory, because all hosts are one machine.
        return self.start_one(role, MESH_METRICS_HOST=here, MESH_FRONTEND_HOST=here, UCX_TLS="tcp,self", **env)

    def _run(self, module: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as stream:
            return subprocess.Popen(
                self._next.command(sys.executable, "-m", module),
                cwd=Path(__file__).resolve().parents[2],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )


@contextmanager
def servers(host: Host, home: Path) -> Iterator[None]:
    """etcd and NATS on one host, listening on its address in the mesh's network."""
    etcd, nats = home / "etcd", home / "nats"
    etcd.mkdir()
    nats.mkdir()
    with ExitStack() as stack:
        for command, place in (
            (_on(host, _etcd_command(_site("etcd", etcd, ETCD_PORT))), etcd),
            (_nats(host, nats), nats),
        ):
            log = stack.enter_context((home / f"{place.name}.log").open("wb"))
            popen = subprocess.Popen([*tethered(), *host.command(*command)], cwd=place, stdout=log, stderr=log)
            stack.callback(popen.wait, PATIENCE_S)
            stack.callback(popen.kill)
        with host.inside():
            for url in (f"http://{host.address}:{ETCD_PORT}/health", f"http://{host.address}:{NATS_PORT + 1}/healthz"):
                wait_until(lambda: _answers(url), f"{url} does not answer")  # noqa: B023
        yield


def _site(name: str, home: Path, port: int) -> Site:
    accounts = Accounts(passwords={ADMINISTRATOR: PASSWORD})
    return Site(f"hosts-{name}", home, port, port + 1, accounts, is_monitored=True)


def _on(host: Host, command: list[str]) -> list[str]:
    return [part.replace("127.0.0.1", host.address) for part in command]


def _nats(host: Host, home: Path) -> list[str]:
    command = _nats_command(_site("nats", home, NATS_PORT))
    config = home / "nats.conf"
    config.write_text(config.read_text().replace("127.0.0.1", host.address))
    assert str(MAX_PAYLOAD_BYTES) in config.read_text()
    return command


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def sent_bytes(host: Host) -> int:
    """Bytes that left the host through the network of the mesh."""
    shown = subprocess.run(
        host.command(IP, "-json", "-stats", "link", "show", DEVICE), capture_output=True, check=True, timeout=PATIENCE_S
    ).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])
