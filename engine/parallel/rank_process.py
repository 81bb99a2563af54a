"""A follower's process, for a model or the mock engine: `python -m engine.parallel.rank_process`.

Standard input is a pipe from the leader. Its only line is a `Start`; it is closed when the leader ends.
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
from typing import Final

import msgspec
from pydantic import TypeAdapter

from components.errors import MeshError
from components.startup import WrongSettings
from engine.model.mock_model import is_mock
from engine.parallel.orders import Report, Start, transfer_socket_of

log = logging.getLogger(__name__)

TORCH: Final = "engine.follower"
MOCK: Final = "engine.mock.mock_follower"


def main(serve: Callable[[Path], None] | None = None) -> None:
    """Run the follower. `serve` starts a transfer end that listens at a path."""
    # both are sent to the whole process group, but the leader decides when to end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.isatty() or not (order := sys.stdin.buffer.readline()):
        sys.exit(
            "a worker with MESH_ENGINE__TENSOR_PARALLEL (--tp) starts its ranks itself; they are not started by hand"
        )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    report = _reporter()
    start = TypeAdapter(Start).validate_json(order)
    home = Path(start.store).parent
    threading.Thread(target=_end_with_leader, args=(home,), daemon=True).start()
    try:
        module = import_module(MOCK if is_mock(start.model) else TORCH)
        if serve is not None:
            serve(transfer_socket_of(home, start.rank))
        module.follow(start, report)
    except Exception as exc:
        message = exc.message if isinstance(exc, MeshError) else f"{type(exc).__name__}: {exc}"
        report(Report(os.getpid(), failure=message, is_setting=isinstance(exc, WrongSettings)))
        if not isinstance(exc, MeshError):
            log.exception("rank %d ends", start.rank)
    os._exit(1)  # without waiting for other ranks, as torch would


def _reporter() -> Callable[[Report], None]:
    """Return a function that writes a report to standard output. All other output is redirected to standard error."""
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lambda report: _write(descriptor, msgspec.json.encode(report) + b"\n")


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _end_with_leader(home: Path) -> None:
    """Exit at the end of standard input, and remove the directory, which a killed leader leaves behind."""
    os.read(sys.stdin.fileno(), 1)  # not through sys.stdin, whose lock would block the exit
    shutil.rmtree(home, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
