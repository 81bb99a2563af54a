"""How this process reaches its peers for KV transfer, seen in /proc.

NIXL reports only its backend's name, and has no call for the transport that UCX chose for a peer. So read /proc: a shared
memory segment, an RDMA device or a TCP connection is open in the process that uses it.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from components.kv_transfer.network import listeners
from components.wire.status import Connection, TransportStatus

MOST_CONNECTIONS: Final = 1024  # reported; a worker has a few for each peer
ESTABLISHED: Final = "01"
SELF: Final = Path("/proc/self")


def observed_transport() -> TransportStatus:
    """Reads files of /proc, which takes some 20 ms. Raises: OSError."""
    maps = (SELF / "maps").read_text(errors="replace")
    files = _open_files()
    return TransportStatus(
        ports=sorted({listener.port for listener in listeners()}),
        connections=_connections(files)[:MOST_CONNECTIONS],
        shared_memory="/ucx_shm_" in maps or "/SYSV" in maps,
        rdma=any(name.startswith("/dev/infiniband") for name in files),
    )


def _open_files() -> set[str]:
    found = set()
    for entry in (SELF / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(str(entry.readlink()))
    return found


def _connections(files: set[str]) -> list[Connection]:
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no IPv6
            for line in (SELF / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and f"socket:[{fields[9]}]" in files:
                    local, remote = (int(fields[side].rpartition(":")[2], 16) for side in (1, 2))
                    found.append(Connection(local=local, remote=remote))
    return found
