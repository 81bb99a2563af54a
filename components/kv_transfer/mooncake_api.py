"""Mooncake's engine, and its settings in the environment."""

import contextlib
import os
import socket
import struct
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from components.errors import BackendUnavailable

LISTENER_LOOKS_UP_S: Final = 1.0

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # by default it writes a dozen lines to stderr per peer
os.environ.setdefault("MC_FORCE_TCP", "1")  # RDMA is not tested
# else the first write waits for a connection
os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
os.environ["MC_TCP_PROTO"] = "2"  # with 1 a write ends when sent, so an aux slot could overtake pages

try:
    _engine: Any = import_module("mooncake.engine")
except ImportError as exc:
    raise ImportError(
        f"{exc}. Mooncake needs: pip install 'kvmesh[mooncake]', and the system libraries libibverbs1 and libnuma1 "
        "(apt install libibverbs1 libnuma1), also where there is no RDMA"
    ) from exc

TransferEngine: Any = _engine.TransferEngine


def start_engine(host: str) -> Any:
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise BackendUnavailable(f"Mooncake's engine cannot start on {host}")
    return engine


def prepare_end(engine: Any) -> None:
    """Shorten the timeout of the engine's next `accept`, and wait for that call.

    The destructor holds the GIL until `accept` returns.
    """
    port = engine.get_rpc_port()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                _hurry(int(entry.name), port)
    time.sleep(LISTENER_LOOKS_UP_S)


def _hurry(number: int, port: int) -> None:
    with socket.socket(fileno=os.dup(number)) as found:
        is_tcp = found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM
        if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
