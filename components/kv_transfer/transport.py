"""Report from /proc how this process reaches its peers for KV transfer.

NIXL reports only its backend's name, and has no call for the transport that UCX chose for a peer. So read /proc: a shared
memory segment, an RDMA device or a TCP connection is open in the process that uses it.
"""

from pathlib import Path
from typing import Final

from components.kv_transfer.network import ESTABLISHED, listeners, open_files, tcp_sockets
from components.wire.status import Connection, TransportStatus

MAX_CONNECTIONS: Final = 1024  # maximum number reported; a worker has a few for each peer
SELF: Final = Path("/proc/self")


def observed_transport() -> TransportStatus:
    """Read /proc, which takes about 20 ms. Raises: OSError."""
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
