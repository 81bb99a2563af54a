"""A rank without a scheduler: `python -m engine.follower` computes what its leader orders.

Standard input is a pipe from the leader: first the orders to start with, then nothing, until the leader ends.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch
from pydantic import TypeAdapter

from components.errors import MeshError
from components.startup import WrongSettings
from engine.build import prepare_model
from engine.config import EngineConfig
from engine.model.progress import silent
from engine.parallel.orders import Compute, CopyPage, MakeModel, Report, Start, decoder, line_of
from engine.parallel.step_line import StepLine
from engine.parts import make_parts
from engine.runner.device_model import DeviceModel
from engine.sharding.group import from_leader, join_group

log = logging.getLogger(__name__)

SPIN_S: Final = 2e-3  # on a device: a wake-up costs more than a launch


def main(serve: Callable[[Path], None] | None = None) -> None:
    """`serve` starts a transfer end that listens at a path."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the leader decides when to end
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    say = _reporter()
    start = TypeAdapter(Start).validate_json(sys.stdin.buffer.readline())
    home = Path(start.store).parent
    threading.Thread(target=_end_with_leader, args=(home,), daemon=True).start()
    try:
        if serve is not None:
            serve(line_of(home, start.rank))
        follow(start, say)
    except Exception as exc:
        message = exc.message if isinstance(exc, MeshError) else f"{type(exc).__name__}: {exc}"
        say(Report(os.getpid(), failure=message, is_setting=isinstance(exc, WrongSettings)))
        if not isinstance(exc, MeshError):
            log.exception("rank %d ends", start.rank)
    os._exit(1)  # without waiting for other ranks, as torch would


def follow(start: Start, say: Callable[[Report], None]) -> None:
    """Load this rank's part, then follow orders until the leader ends."""
    config, state_dir = start.config, Path(start.state_dir)
    loaded = prepare_model(start.model, config, state_dir, silent, start.rank)
    about = Report(os.getpid(), str(loaded.device))
    say(about)
    join_group(Path(start.store), start.rank, config.tensor_parallel, loaded.device)
    line = StepLine(config.tensor_parallel, start.memory, start.wakers)
    spin_s = SPIN_S if loaded.device.type == "cuda" else 0.0
    models: dict[int, DeviceModel] = {}
    while True:
        match decoder.decode(line.receive(start.rank, spin_s)):
            case Compute(number, inputs):
                with torch.inference_mode():
                    ahead_ids = None
                    if inputs.ahead:
                        ahead_ids = from_leader(torch.empty(len(inputs.ahead), dtype=torch.int64, device=loaded.device))
                    models[number].compute(inputs, ahead_ids)
            case CopyPage(number, source, target):
                models[number].copy_page(source, target)
            case MakeModel(number, settings):
                chosen = TypeAdapter(EngineConfig).validate_json(settings)
                parts = make_parts(loaded, chosen, silent)
                models[number] = parts.model
                storage = parts.pool.storage
                say(msgspec.structs.replace(about, address=storage.data_ptr(), num_pages=len(storage)))


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
