"""The device that a setting names; functions of torch.cuda are fakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from engine.errors import DeviceUnavailable
from engine.model.load import pick_device

GPU: Any = yaml.safe_load((Path(__file__).parents[3] / "deploy/compose/docker-compose.gpu.yml").read_text())


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_cuda_device_always_has_an_index(name: str, device: str) -> None:
    """`cuda` alone, as in the compose file for GPUs, ended in a ValueError after loading the weights."""
    assert str(pick_device(name)) == device


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_compose_file_for_gpus_names_a_device_that_torch_can_be_set_to(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pick_device(GPU["services"][role]["environment"]["MESH_ENGINE__DEVICE"])
    driver: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", driver.append, raising=False)  # a CPU build has none
    torch.cuda.set_device(device)
    assert driver == [1]


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceUnavailable, match="device=cuda:2: there are 2 CUDA devices"):
        pick_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_is_said_what_to_do() -> None:
    assert str(pick_device("auto")) == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(DeviceUnavailable, match=f"device={name}: .* set device=cpu"):
            pick_device(name)
