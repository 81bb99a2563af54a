"""Followers as forks of a process that has imported their modules, which takes four seconds of a core.

A fork runs `python -m <module>` with the descriptors and environment from its leader. Tests of the start itself run the
command.
"""

import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Final
from unittest import mock

from engine.parallel import rank_processes
from tests.mesh.preloaded import REPO, Fork, set_subreaper
from tests.waiting import PATIENCE_S

IMPORTED: Final = ("engine.follower", "engine.build", "transformers.models.llama.modeling_llama")
MAIN: Final = "engine.parallel.rank_process"
ASIDE: Final = 500  # larger than any descriptor of a leader
MAX_BYTES: Final = 1 << 20


class ForkedRank(Fork):
    """The methods of `subprocess.Popen` that a leader uses."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = stdin, stdout


class ForkingRanks:
    """The process that forks, started at first use. Leaving it ends that process, but not its forks."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, command: Sequence[str], *, stdin: int, stdout: int, pass_fds: Sequence[int]) -> ForkedRank:
        assert (stdin, stdout) == (subprocess.PIPE, subprocess.PIPE)
        sender = self._socket or self._started()
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        asked = {"module": command[-1], "env": dict(os.environ), "fds": [0, 1, *pass_fds]}
        set_subreaper(on=True)  # the fork of a fork becomes our child
        try:
            socket.send_fds(sender, [json.dumps(asked).encode()], [read_in, write_out, *pass_fds])
            pid = int(sender.recv(MAX_BYTES))
            assert sender.recv(MAX_BYTES) == b"forked"
        finally:
            set_subreaper(on=False)
            os.close(read_in)
            os.close(write_out)
        return ForkedRank(pid, os.fdopen(write_in, "wb"), os.fdopen(read_out, "rb"))

    def _started(self) -> socket.socket:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # importing numpy would start threads
        command = [sys.executable, "-m", "tests.engine.parallel.forked_ranks", str(theirs.fileno())]
        self._parent = subprocess.Popen(
            command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._parent is not None:
            self._socket.close()
            self._parent.wait(PATIENCE_S)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let leaders fork their followers inside."""
        names = SimpleNamespace(PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired, Popen=self.start)
        with mock.patch.object(rank_processes, "subprocess", names):
            yield


def _serve(receiver: socket.socket) -> str:
    """Fork for each message. Return the fork's module, in the fork."""
    while True:
        message, fds, _, _ = socket.recv_fds(receiver, MAX_BYTES, 50)
        if not message:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
            receiver.send(b"forked")  # its parent has ended
            continue
        if child := os.fork():
            receiver.send(str(child).encode())
            os._exit(0)
        receiver.close()
        asked = json.loads(message)
        aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, ASIDE) for fd in fds]
        for fd in fds:
            os.close(fd)
        for fd, number in zip(aside, asked["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(asked["env"])
        return str(asked["module"])


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    sys.modules.pop(MAIN, None)  # runpy warns of a loaded module
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has only one of its parent's threads"
    gc.collect()
    gc.freeze()
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
