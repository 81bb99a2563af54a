"""python -m engine.parallel.rank_process: a follower's process, of a model or of the mock.

Standard input is a pipe from the leader: first the orders to start with, then nothing, until the leader ends.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
from pydantic import TypeAdapter

from components.errors import MeshError
from components.startup import WrongSettings
from engine.model.mock_model import is_mock
from engine.parallel.orders import Report, Start, transfer_socket_of

log = logging.getLogger(__name__)

TORCH: Final = "engine.follower"
MOCK: Final = "engine.mock.mock_follower"


class Follow(Protocol):
    def __call__(self, start: Start, report: Callable[[Report], None]) -> None:
        """Obey until the leader ends."""


def main(serve: Callable[[Path], None] | None = None) -> None:
    """`serve` starts a transfer end that listens at a path."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the leader decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    report = _reporter()
    start = TypeAdapter(Start).validate_json(sys.stdin.buffer.readline())
    home = Path(start.store).parent
    threading.Thread(target=_end_with_leader, args=(home,), daemon=True).start()
    try:
        follow = cast("Follow", import_module(MOCK if is_mock(start.model) else TORCH).follow)
        if serve is not None:
            serve(transfer_socket_of(home, start.rank))
        follow(start, report)
    except Exception as exc:
        message = exc.message if isinstance(exc, MeshError) else f"{type(exc).__name__}: {exc}"
        report(Report(os.getpid(), failure=message, is_setting=isinstance(exc, WrongSettings)))
        if not isinstance(exc, MeshError):
            log.exception("rank %d ends", start.rank)
    os._exit(1)  # without waiting for other ranks, as torch would


def _reporter() -> Callable[[Report], None]:
    """Standard output is for reports alone: what else is printed goes to standard error."""
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lambda report: _write(descriptor, msgspec.json.encode(report) + b"\n")


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _end_with_leader(home: Path) -> None:
    """Exit at the end of standard input. A leader that was killed has left its directory behind."""
    os.read(sys.stdin.fileno(), 1)  # sys.stdin would hold its lock at exit
    shutil.rmtree(home, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
