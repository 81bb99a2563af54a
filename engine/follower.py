"""A rank without a scheduler: it computes what its leader orders."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch
from pydantic import TypeAdapter

from engine.build import prepare_model
from engine.config import EngineConfig
from engine.model.progress import silent
from engine.parallel.orders import Compute, CopyPages, MakeModel, Report, Start, decoder
from engine.parallel.step_line import StepLine
from engine.parts import make_parts
from engine.runner.device_model import DeviceModel
from engine.sharding.group import from_leader, join_group

SPIN_S: Final = 2e-3  # on a device: a wake-up costs more than a launch


def follow(start: Start, report: Callable[[Report], None]) -> None:
    """Load this rank's part, then follow orders until the leader ends."""
    config, state_dir = start.config, Path(start.state_dir)
    loaded = prepare_model(start.model, config, state_dir, silent, start.rank)
    about = Report(os.getpid(), str(loaded.device))
    report(about)
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
            case CopyPages(number, moves):
                models[number].copy_pages(moves)
            case MakeModel(number, settings):
                chosen = TypeAdapter(EngineConfig).validate_json(settings)
                parts = make_parts(loaded, chosen, silent, shared=start.staging)
                models[number] = parts.model
                storage = parts.pool.storage
                report(msgspec.structs.replace(about, address=storage.data_ptr(), num_pages=len(storage)))
