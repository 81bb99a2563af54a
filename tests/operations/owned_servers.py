"""An etcd and a NATS that a test stops, empties, restores and restarts."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.local.accounts import Accounts
from services.local.child_process import kill
from services.local.servers import ETCD, NATS, Server, running


@dataclass(slots=True)
class OwnedServers:
    """Its methods must run in the thread that opened it."""

    etcd: Server
    nats: Server
    _runner: asyncio.Runner

    def kill(self, server: Server) -> None:
        assert server.process is not None
        self._runner.run(kill(server.process))

    def start(self, server: Server) -> None:
        """Start it on its data; return when it answers."""
        self._runner.run(server.restart())

    def reload(self, server: Server) -> None:
        """SIGHUP."""
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGHUP)


@contextmanager
def owned_servers(home: Path, accounts: Accounts) -> Iterator[OwnedServers]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        etcd, nats = (
            runner.run(stack.enter_async_context(running(kind, home / "servers", accounts=accounts, is_monitored=True)))
            for kind in (ETCD, NATS)
        )
        try:
            yield OwnedServers(etcd, nats, runner)
        finally:
            runner.run(stack.aclose())


def lose_data(server: Server) -> None:
    """Remove the data of a stopped server, but not its configuration."""
    for name in ("data", "jetstream"):
        shutil.rmtree(server.home / name, ignore_errors=True)
