"""Compile the engine's launches for an H100 or H200 without having one.

For scripts: Triton interprets or compiles for the life of a process.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    shared_bytes: int
    ptx: str
    log: str  # of ptxas

    def assembled(self) -> tuple[int, int]:
        """The registers of a thread, and spilled bytes."""
        (registers,) = re.findall(r"Used (\d+) registers", self.log)
        (stored,) = re.findall(r"(\d+) bytes spill stores", self.log)
        (loaded,) = re.findall(r"(\d+) bytes spill loads", self.log)
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
            with redirect_stdout(io.StringIO()) as log:
                made = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            found.setdefault(
                id(made), Compiled(kernel.__name__, int(made.metadata.shared), str(made.asm["ptx"]), log.getvalue())
            )

        return bind

    kernels: list[Compiled] = []
    driver.set_active(_NoGpu())
    with (
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        mock.patch.object(JITFunction, "__getitem__", launch),
    ):
        knobs.nvidia.dump_ptxas_log = True  # printed when a kernel is compiled, and not when one is read from a cache
        knobs.compilation.always_compile = True
        yield kernels
    kernels.extend(found.values())
