"""A CUDA device made of main memory, for tests of the engine's device code where there is no GPU.

Its tensors compute on the CPU, but torch treats them as tensors of a GPU. Like a GPU, it refuses some operations and
ends others late:

- operations with tensors in main memory and on the device are refused;
- copies in both directions end when the host waits: until then a copy to the host has undefined values, and pinned
  memory that is still to be read must not change;
- while a graph is recorded the host cannot wait, and nothing is computed;
- kernels of Triton, which run in its interpreter, take tensors of the device only.

All work is in one stream: work that runs side by side is not simulated.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.simulated.recorded_graph import UNDEFINED, RecordedGraph

KEPT_PINNED: Final = 4096  # tensors; pinned memory is known by its address
aten: Final = torch.ops.aten
COMPOSED: Final = {  # copies, and queries of a tensor's device
    *(aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.to.prim_Device),
    *(aten.item.default, aten.is_nonzero.default, aten.type_as.default),
}
READING: Final = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
}
INDEXING: Final = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}  # copy host indices
FLOATING: Final = {aten.histc.default}  # takes integers on a GPU, and only floats on a CPU
INDICES: Final = {torch.int64, torch.int32, torch.bool, torch.uint8}
RUN_KERNEL: Final = InterpretedFunction.run


class SimulationError(AssertionError):
    """A GPU would refuse this, or return another result."""


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device. `host` is the same memory as a tensor of the CPU."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        device = RUNNING[-1].device
        made = torch.Tensor._make_subclass(cls, host, False, dispatch_device=True, device_for_backend_keys=device)
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return RUNNING[-1].dispatch(func, args, kwargs or {})


class _Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch ships it
    """Intercepts operations without a tensor of the device, such as those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return RUNNING[-1].dispatch(func, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class _Copy:
    """An enqueued copy that may not have ended."""

    host: torch.Tensor
    values: torch.Tensor
    to_host: bool

    def end(self) -> None:
        if self.to_host:
            self.host.copy_(self.values)
        elif not torch.equal(_bytes(self.host), _bytes(self.values)):
            raise SimulationError(f"pinned memory was changed before it was copied: {self.values} is now {self.host}")


class SimulatedDevice:
    """Holds the copies that are enqueued, the graph that is recorded, and the pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits: list[str] = []  # reasons for which the host waited
        self.launches: list[str] = []  # kernels
        self._mode = _Dispatching()  # type: ignore[no-untyped-call]
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self.registered: set[int] = set()  # addresses of other memory that the device may read
        self._copies: list[_Copy] = []
        self._ended = 0  # copies
        self._recording: RecordedGraph | None = None
        self._graphs: list[RecordedGraph] = []
        self._lock = threading.RLock()

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Each thread that makes tensors on the device needs it."""
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then makes values in main memory, and copies them
        try:
            with self._mode:
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    # Operations

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            return self._dispatch(func, args, dict(kwargs))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return self.device
        if func is aten._has_compatible_shallow_copy_type.default:
            return False
        if func in COMPOSED:
            with self._mode:
                return func.decompose(*args, **kwargs)
        if func.namespace == "kvmesh":  # an operator of the engine, made of others
            with self._mode:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        wanted = kwargs.get("device")
        if not on_device and (wanted is None or torch.device(wanted).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        self._check(func, tensors)
        if wanted is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return self._computed(func, on_device, *tree_map(host_of, (tuple(args), kwargs)))

    def _computed(self, func: Any, on_device: Sequence[DeviceTensor], args: Any, kwargs: Any) -> Any:
        graph, writes = self._graph(), bool(func._schema.is_mutable) or func.namespace == "c10d"
        if func in READING:
            self.wait(str(func))
        if graph is not None and writes:
            graph.will_write([tensor.host for tensor in on_device])

        def work() -> Any:
            if func in FLOATING:
                return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
            out = func(*args, **kwargs)
            if func.namespace == "c10d":  # of several ranks: where a device waits, and the host need not
                out[-1].wait()
            return out

        out = work()
        for tensor in on_device:
            if tensor.host.shape != tensor.shape or tensor.host.stride() != tensor.stride():
                raise NotImplementedError(f"{func} changes a tensor's shape in place")
        if graph is not None:
            graph.add(work, (args, kwargs), out, writes=writes)
        known = {id(tensor.host): tensor for tensor in on_device}

        def on_the_device(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else DeviceTensor(leaf)

        return tree_map(on_the_device, out)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func in {aten.pin_memory.default, aten._pin_memory.default}:
            return args[0] if self._is_pinned(args[0]) else self._pin(args[0].clone())
        pinned = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        return self._pin(out) if pinned else out

    def _check(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DeviceTensor) or tensor.dim() == 0:
                continue
            if func not in INDEXING or tensor.dtype not in INDICES:
                raise SimulationError(f"{func}: a tensor {tuple(tensor.shape)} in main memory, and one on the device")
            self.wait(f"{func} with indices in main memory")

    def launch(self, kernel: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Run a kernel of Triton."""
        tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        if any(not isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise SimulationError(f"{kernel.__name__} cannot read main memory")
        host_args, host_kwargs = tree_map(host_of, (args, kwargs))

        def work() -> None:
            RUN_KERNEL(kernel, *host_args, grid=grid, warmup=warmup, **host_kwargs)

        with self._lock:
            self.launches.append(kernel.__name__)
            if (graph := self._graph()) is not None:
                graph.will_write([host_of(tensor) for tensor in tensors])
                graph.add(work, (), (), writes=True)
            work()

    # Copies

    def _to_copy(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        non_blocking, device = kwargs.pop("non_blocking", False), kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        to_host = device is not None and torch.device(device).type == "cpu"
        if isinstance(source, DeviceTensor) and not to_host:
            made: torch.Tensor = self._computed(aten._to_copy.default, [source], (source.host,), kwargs)
            return made
        values = aten._to_copy.default(self._read(source, non_blocking=non_blocking), **kwargs)
        if not to_host:
            return DeviceTensor(values)
        if not non_blocking:
            self.wait("copy to main memory")
            return values
        return self._arriving(self._pin(torch.empty_like(values)), values)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(target, DeviceTensor):
            on_device = isinstance(source, DeviceTensor)
            values = host_of(source) if on_device else self._read(source, non_blocking=non_blocking)
            self._computed(aten.copy_.default, [target], (target.host, values), {})
            return target
        values = self._read(source, non_blocking=non_blocking)
        if non_blocking and self._is_pinned(target):
            return self._arriving(target, values.to(target.dtype).expand(target.shape))
        self.wait("copy to main memory")
        return target.copy_(values)

    def _read(self, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        """Return the values of `source` for a copy between device and host."""
        if self._graph() is not None:
            raise SimulationError("a graph copies between device and main memory")
        values = host_of(source).clone()
        if not isinstance(source, DeviceTensor) and source.numel():
            if non_blocking and self._is_pinned(source):
                self._copies.append(_Copy(source, values, to_host=False))
            else:
                self.wait("copy from pageable memory")
        return values

    def _arriving(self, host: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if host.numel():
            self._copies.append(_Copy(host, values, to_host=True))
            _bytes(host).fill_(UNDEFINED) if host.is_contiguous() else host.fill_(-1)
        return host

    @property
    def enqueued(self) -> int:
        """Copies so far."""
        return self._ended + len(self._copies)

    @torch.inference_mode()
    def end_copies(self, upto: int | None = None) -> None:
        """End the first `upto` copies, by default all, in their order."""
        with self._lock:
            while self._copies and (upto is None or self._ended < upto):
                self._ended += 1
                self._copies.pop(0).end()

    def wait(self, reason: str) -> None:
        """Let the host wait for the device. Raises: RuntimeError, while this thread records a graph."""
        if self._graph() is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.waits.append(reason)
        self.end_copies()

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._pinned or address in self.registered

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._pinned[tensor.untyped_storage().data_ptr()] = tensor
            while len(self._pinned) > KEPT_PINNED:
                self._pinned.pop(next(iter(self._pinned)))
        return tensor

    # Graphs

    def _graph(self) -> RecordedGraph | None:
        """The one that this thread records."""
        graph = self._recording
        return graph if graph is not None and graph.is_of_this_thread else None

    @contextmanager
    def recording(self, pool: object) -> Iterator[RecordedGraph]:
        assert self._recording is None, "one graph is recorded at a time"
        self.wait("synchronize")
        graph = self._recording = RecordedGraph(pool)
        try:
            yield graph
        finally:
            self._recording = None
            with torch.inference_mode():
                graph.end()
        self._graphs.append(graph)

    @torch.inference_mode()
    def replay(self, graph: RecordedGraph) -> None:
        with self._lock:
            for other in self._graphs:
                if other.pool is graph.pool:
                    other.forget()
            graph.replay()


RUNNING: Final[list[SimulatedDevice]] = []  # the last is in use


def host_of(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, DeviceTensor) else leaf


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
