"""The one name of Mooncake that we use, with the settings that its library reads from the environment.

Raises: ImportError, saying what to install.
"""

import os
from importlib import import_module
from typing import Any

from components.errors import BackendUnavailable

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else a dozen lines on stderr for each engine, and each peer has one
os.environ.setdefault("MC_FORCE_TCP", "1")  # without it a machine with RDMA would use what nobody has run here
os.environ.setdefault(
    "MC_TCP_ENABLE_CONNECTION_POOL", "1"
)  # off, posting a write first waits for a connection of its own

try:
    _engine: Any = import_module("mooncake.engine")
except ImportError as exc:
    raise ImportError(
        f"{exc}. Mooncake needs: pip install 'kvmesh[mooncake]', and the system libraries libibverbs1 and libnuma1 "
        "(apt install libibverbs1 libnuma1), also where there is no RDMA"
    ) from exc

TransferEngine: Any = _engine.TransferEngine


def start_engine(host: str) -> Any:
    """An engine on free ports of `host`, found by peers without a metadata server. Raises: BackendUnavailable."""
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise BackendUnavailable(f"Mooncake's engine does not start on {host}")
    return engine
