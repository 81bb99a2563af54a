"""The sockets of a process, and the transport of its KV transfers, as /proc shows them."""

import logging
import struct
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, NamedTuple

from components.wire.status import Connection, TransportStatus

log = logging.getLogger(__name__)

# socket states in /proc/<pid>/net/tcp
ESTABLISHED: Final = "01"
LISTEN: Final = "0A"
MAX_CONNECTIONS: Final = 1024  # reported; a worker has a few for each peer
SELF: Final = Path("/proc/self")


class Listener(NamedTuple):
    address: IPv4Address | IPv6Address
    port: int


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
    """A process's TCP listeners; None: of this one."""
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


def observed_transport() -> TransportStatus:
    """How this process reaches its peers for KV transfer. Reading /proc takes some 20 ms. Raises: OSError.

    NIXL has no call for the transport that UCX chose for a peer. But the process that uses a shared memory segment, an RDMA
    device or a TCP connection has it open.
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
