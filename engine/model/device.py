"""Choose the device of a model."""

import torch

from engine.model.errors import DeviceUnavailable


def pick_device(name: str) -> torch.device:
    """A CUDA device gets an index. `auto` is the first CUDA device, else the CPU; `cuda` is torch's current one.
    Raises: DeviceUnavailable.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise DeviceUnavailable(f"device={name} is none that torch knows: it is auto, cpu, cuda or cuda:N") from exc
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"device={name}: torch {torch.__version__} finds no CUDA device here; set device=cpu, or install its CUDA build "
            "and give this process a GPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(f"device={name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)
