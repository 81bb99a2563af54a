"""torch with a simulated CUDA device."""

import ctypes
import math
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from triton.runtime.interpreter import InterpretedFunction

from engine.attention.triton_kernels import OPERANDS
from tests.engine.interpreted import without_waste
from tests.engine.simulated.recorded_graph import RecordedGraph
from tests.engine.simulated.simulated_device import RUNNING, DeviceTensor, SimulatedDevice

TOTAL_BYTES: Final = 256 << 20
USED_BYTES: Final = 16 << 20
# Without it torch refuses tensors of a device that it was built without.
GUARD: Final = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
} guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}
"""
AS_TENSOR: Final = torch.as_tensor
INIT_PROCESS_GROUP: Final = dist.init_process_group


class _Event:
    def __init__(self, *_args: Any, **_options: Any) -> None:
        self._position = 0
        self._asked = False

    def record(self, _stream: object = None) -> None:
        self._position, self._asked = RUNNING[-1].enqueued, False

    def query(self) -> bool:
        """False at the first call: the device is always late."""
        asked, self._asked = self._asked, True
        if asked:
            self.synchronize()
        return asked

    def synchronize(self) -> None:
        RUNNING[-1].end_copies(self._position)


class _Stream:
    device_index = 0

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def synchronize(self) -> None:
        _synchronize()


class _CudaGraph:
    recorded: RecordedGraph

    def replay(self) -> None:
        RUNNING[-1].replay(self.recorded)


@contextmanager
def _record(graph: _CudaGraph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
    with RUNNING[-1].recording(pool) as graph.recorded:
        yield


@contextmanager
def _entered(*_args: Any) -> Iterator[None]:
    yield


def _synchronize(_device: object = None) -> None:
    RUNNING[-1].wait("synchronize")


def _as_tensor(data: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Accept also memory of the device by its address."""
    described = None if isinstance(data, torch.Tensor) else getattr(data, "__cuda_array_interface__", None)
    if described is None:
        return AS_TENSOR(data, *args, **options)
    assert described["typestr"] == "|u1"
    memory = (ctypes.c_uint8 * math.prod(described["shape"])).from_address(described["data"][0])
    return DeviceTensor(torch.frombuffer(memory, dtype=torch.uint8).view(described["shape"]))


def _init_process_group(backend: str, *, device_id: torch.device, **options: Any) -> None:
    assert backend == "nccl"
    INIT_PROCESS_GROUP("gloo", **options)


def _register(address: int, _num_bytes: int, _flags: int) -> int:
    registered = RUNNING[-1].registered
    if address in registered:
        return 712  # cudaErrorHostMemoryAlreadyRegistered
    registered.add(address)
    return 0


def _unregister(address: int) -> int:
    for device in RUNNING:  # none, if the memory outlives the device
        device.registered.discard(address)
    return 0


def _launch(*args: Any, **options: Any) -> None:
    RUNNING[-1].launch(*args, **options)


@cache
def _link_guard() -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "guard.cpp", Path(directory) / "guard.so"
        source.write_text(GUARD)
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        subprocess.run(["c++", *options, str(source), "-lc10", "-o", str(library)], check=True)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


@contextmanager
def simulated_cuda(index: int = 0) -> Iterator[SimulatedDevice]:
    """Inside, torch has two CUDA devices, of which this process uses one. Sums over ranks use gloo, not NCCL.

    Not for builds of torch with CUDA. It needs TRITON_INTERPRET=1 in the environment.
    """
    assert torch.version.cuda is None
    _link_guard()
    simulated, run = SimulatedDevice(torch.device("cuda", index)), threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with simulated.on_this_thread():
            run(thread)

    answers: Mapping[str, Any] = {
        "is_available": True,
        "device_count": 2,
        "current_device": index,
        "mem_get_info": (TOTAL_BYTES - USED_BYTES, TOTAL_BYTES),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_reserved"), USED_BYTES),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_device_properties": SimpleNamespace(multi_processor_count=4, major=9, minor=0, total_memory=TOTAL_BYTES),
        "current_stream": _Stream(),
        "cudart": SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
        **dict.fromkeys(("_lazy_init", "empty_cache", "reset_peak_memory_stats", "set_device", "set_stream")),
        **dict.fromkeys(("set_rng_state", "manual_seed_all")),
    }
    changed: Mapping[str, Any] = {
        **{name: mock.Mock(return_value=answer) for name, answer in answers.items()},
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": _CudaGraph,
        "graph": _record,
        "graph_pool_handle": object,
        "device": _entered,
        "stream": _entered,
        "synchronize": _synchronize,
    }
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_endAllocateToPool", mock.Mock(), create=True))
        stack.enter_context(mock.patch.object(torch, "as_tensor", _as_tensor))
        stack.enter_context(mock.patch.object(dist, "init_process_group", _init_process_group))
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", _launch))
        stack.enter_context(without_waste())  # also in processes without the fixture of tests/engine
        # the interpreter's numpy has no bfloat16
        stack.enter_context(mock.patch.dict(OPERANDS, {torch.bfloat16: OPERANDS[torch.float32]}))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_there))
        torch.__future__.set_swap_module_params_on_conversion(True)  # or a module that moves would keep its device
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        RUNNING.append(simulated)
        stack.callback(RUNNING.pop)
        stack.enter_context(simulated.on_this_thread())
        yield simulated
