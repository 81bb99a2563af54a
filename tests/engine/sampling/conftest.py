from collections.abc import Sequence
from importlib import import_module

import pytest
import torch

from engine.sampling.row import Row
from engine.sampling.sampler import Draw
from tests.device import TESTED


@pytest.fixture(autouse=True)
def _drawn_on_the_tested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that a test makes on the CPU are drawn from on the device."""
    if TESTED["device"] == "cpu":
        return
    sampler = import_module("engine.sampling.device_sampler").DeviceSampler
    draw = sampler.draw

    def moved(self: object, logits: torch.Tensor, rows: Sequence[Row]) -> Draw:
        drawn: Draw = draw(self, logits.to(TESTED["device"]), rows)
        return drawn

    monkeypatch.setattr(sampler, "draw", moved)
