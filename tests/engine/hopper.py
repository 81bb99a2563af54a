"""Compile the engine's launches for an H100 or H200 without having one.

For scripts: Triton interprets or compiles for the life of a process.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    shared_bytes: int
    ptx: str
    options: tuple[str, ...]  # for ptxas

    def assembled(self) -> tuple[int, int]:
        """The registers of a thread, and spilled bytes."""
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "kernel.ptx"
            source.write_text(self.ptx)
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", *self.options, str(source), "-o", "/dev/null"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (registers,) = re.findall(r"Used (\d+) registers", told)
        (stored,) = re.findall(r"(\d+) bytes spill stores", told)
        (loaded,) = re.findall(r"(\d+) bytes spill loads", told)
        return int(registers), int(stored) + int(loaded)


class _NoGpu:
    """Replaces Triton's driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextmanager
def compiled_launches() -> Iterator[list[Compiled]]:
    """Inside, a launch binds its arguments and compiles its kernel, but runs nothing. Yields each kernel once."""
    found: dict[int, Compiled] = {}

    def launch(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        def bind(*args: Any, **kwargs: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            options = () if kwargs.get("enable_fp_fusion", True) else ("--fmad=false",)
            found.setdefault(
                id(made), Compiled(kernel.__name__, int(made.metadata.shared), str(made.asm["ptx"]), options)
            )

        return bind

    kernels: list[Compiled] = []
    driver.set_active(_NoGpu())
    with mock.patch.object(JITFunction, "__getitem__", launch):
        yield kernels
    kernels.extend(found.values())
