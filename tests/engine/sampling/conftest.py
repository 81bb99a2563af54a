import pytest
import torch

from engine.sampling.row import Row
from engine.sampling.sampler import Draw, Sampler
from tests.device import TESTED


@pytest.fixture(autouse=True)
def _drawn_on_the_tested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that a test makes on the CPU are drawn from on the device."""
    draw = Sampler.draw

    def moved(self: Sampler, logits: torch.Tensor, rows: list[Row]) -> Draw:
        return draw(self, logits.to(TESTED["device"]), rows)

    monkeypatch.setattr(Sampler, "draw", moved)
