"""Choose the network interface of NIXL's UCX, and see in /proc which way it takes to peers.

UCX listens on all interfaces by default, and a few bytes sent to its port can crash the process.
"""

import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple

from components.wire.status import Connection, TransportStatus

log = logging.getLogger(__name__)

UCX_DEVICES: Final = "UCX_NET_DEVICES"
UCX_MODULES: Final = "UCX_MODULES"
UCX_USER_TIMEOUT: Final = "UCX_TCP_USER_TIMEOUT"
UCX_IPC_CACHE: Final = "UCX_CUDA_IPC_CACHE"
UNANSWERED: Final = "5s"  # TCP drops a connection whose bytes are unacknowledged for this long
NO_RDMA: Final = "^ib"  # all modules except this one
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of Linux
# socket states in /proc/<pid>/net/tcp
ESTABLISHED: Final = "01"
LISTEN: Final = "0A"
MAX_CONNECTIONS: Final = 1024  # maximum number reported; a worker has a few for each peer
SELF: Final = Path("/proc/self")


class Listener(NamedTuple):
    address: IPv4Address | IPv6Address
    port: int


def choose_devices(host: str) -> None:
    """Restrict UCX to the interface of `host`, and to RDMA devices unless that is loopback."""
    if os.environ.get(UCX_DEVICES):
        return
    name = _interface(host)
    if name is None:
        log.warning(
            "no interface has the address for KV transfer, so NIXL listens on all; set MESH_KV_TRANSFER_HOST",
            extra={"host": host},
        )
        return
    devices = [name] if ip_address(host).is_loopback else [name, *_rdma_devices()]
    os.environ[UCX_DEVICES] = ",".join(devices)


def leave_out_rdma() -> None:
    """Keep UCX's RDMA module out where no RDMA device exists.

    The module of nixl 1.5.1 ends an exiting process with SIGSEGV on Debian 12.
    """
    if not _rdma_devices():
        os.environ.setdefault(UCX_MODULES, NO_RDMA)


def drop_dead_connections() -> None:
    """Make the kernel close a connection whose peer is unreachable, and drop its unacknowledged bytes.

    By default the kernel resends them for 15 minutes, so they could land after decode has reused its pages.
    """
    os.environ.setdefault(UCX_USER_TIMEOUT, UNANSWERED)


def unmap_after_writes() -> None:
    """Make UCX unmap a peer's GPU memory when no write is in flight.

    By default it stays mapped, and a mapping keeps the memory of a killed peer allocated. A restart on the same GPU
    would then find no free memory. The first peer on each GPU stays mapped nevertheless, until it is disconnected.
    """
    os.environ.setdefault(UCX_IPC_CACHE, "n")


@contextmanager
def new_listeners_logged() -> Iterator[None]:
    """Log the listening sockets that are opened within the context."""
    before = listeners()
    yield
    since = sorted(listeners() - before)
    facts = {"addresses": [f"{listener.address}:{listener.port}" for listener in since]}
    if any(listener.address.is_global for listener in since):
        log.warning(
            "KV transfer listens on a public address: anyone who reaches it can crash this worker, and may read and write "
            "its memory. Set MESH_KV_TRANSFER_HOST to a private address of this machine, or close the port",
            extra=facts,
        )
    elif since:
        log.info("KV transfer listens; let only workers reach these ports", extra=facts)


def listeners(pid: int | None = None) -> Set[Listener]:
    """Return the TCP listeners of a process, by default of this one."""
    process = Path("/proc") / str(pid or "self")
    return {_listener(local) for local, _ in tcp_sockets(process, LISTEN, open_files(process))}


def open_files(process: Path) -> set[str]:
    """Targets of the open file descriptors of /proc/<pid>: paths, and `socket:[<inode>]`."""
    found = set()
    for entry in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(str(entry.readlink()))
    return found


def tcp_sockets(process: Path, state: str, files: Set[str]) -> list[tuple[str, str]]:
    """Local and remote address of each TCP socket in `state` that is among `files`.

    Source: proc_net_tcp of the kernel's documentation.
    """
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no IPv6
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and f"socket:[{fields[9]}]" in files:
                    found.append((fields[1], fields[2]))
    return found


def _listener(local: str) -> Listener:
    """Parse hexadecimal words in the machine's byte order, a colon and the port."""
    address, port = local.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return Listener(ip_address(struct.pack(f"={len(words)}I", *words)), int(port, 16))


def _interface(host: str) -> str | None:
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None


def _rdma_devices() -> list[str]:
    """`<device>:<port>` of each InfiniBand or RoCE device."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*"))


def observed_transport() -> TransportStatus:
    """How this process reaches its peers for KV transfer. Reads files of /proc, which takes some 20 ms. Raises: OSError.

    NIXL reports only its backend's name, and has no call for the transport that UCX chose for a peer. But a shared memory
    segment, an RDMA device or a TCP connection is open in the process that uses it.
    """
    maps = (SELF / "maps").read_text(errors="replace")
    files = open_files(SELF)
    return TransportStatus(
        ports=sorted({listener.port for listener in listeners()}),
        connections=_connections(files)[:MAX_CONNECTIONS],
        shared_memory="/ucx_shm_" in maps or "/SYSV" in maps,
        rdma=any(name.startswith("/dev/infiniband") for name in files),
    )


def _connections(files: set[str]) -> list[Connection]:
    sockets = tcp_sockets(SELF, ESTABLISHED, files)
    return [Connection(local=_port(local), remote=_port(remote)) for local, remote in sockets]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
