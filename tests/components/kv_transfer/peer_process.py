"""Runs `nixl_peer` as a process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from components.wire.instances import KvEndpoint
from services.local.child_process import tethered
from tests.components.kv_transfer.nixl_peer import LAYOUT
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[3]
StartPeer = Callable[..., "Peer"]  # (agent, backend="nixl", page_size=…) -> Peer


class Peer:
    def __init__(self, agent: str, backend: str = "nixl", page_size: int = LAYOUT.page_size) -> None:
        module = "tests.components.kv_transfer.nixl_peer"
        self.popen = subprocess.Popen(
            [*tethered(), sys.executable, "-m", module, agent, backend, str(page_size)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def endpoint(self) -> KvEndpoint:
        """Read lazily, so that several peers start in parallel."""
        return msgspec.json.decode(self.read(), type=KvEndpoint)

    def read(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def say(self, line: str) -> Any:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return self.read()

    def mapped(self) -> set[Path]:
        """The named files in shared memory that it maps."""
        lines = Path(f"/proc/{self.popen.pid}/maps").read_text().splitlines()
        return {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def running_peers() -> Iterator[StartPeer]:
    """Start peers, which are killed at the end."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(Peer(*args, **options)))
