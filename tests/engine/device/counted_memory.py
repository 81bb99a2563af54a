"""A device on the CPU that counts the memory allocated by torch."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.compilation.device import DeviceForward
from engine.compilation.forward import Forward
from engine.config import EngineConfig
from engine.device.memory import MemoryReading
from engine.model.load import LoadedModel
from engine.model.progress import Progress, silent


class CountedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch ships it
    """Counts within `with`. `others`: bytes of other processes."""

    def __init__(self, total: int, loaded: LoadedModel, others: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = total
        self.others = others
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0
        self._count([*loaded.module.parameters(), *loaded.module.buffers()])

    @property
    def own(self) -> int:
        for key in [key for key, (storage, _) in self._held.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            del self._held[key]
        return sum(size for _, size in self._held.values())

    def measure(self) -> MemoryReading:
        gc.collect()
        own = self.own
        return MemoryReading(self.total, self.total - self.others - own, own)

    def start_peak(self) -> None:
        self._most = self.own

    def peak(self) -> int:
        return self._most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        own = self.own
        if own > self.total - self.others:
            raise torch.OutOfMemoryError(f"{own} bytes of {self.total - self.others}")
        self._most = max(self._most, own)
        return result

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._held.setdefault(weak.cdata, (weak, storage.nbytes()))


class Graphs:
    """Recorders whose graphs hold memory: the first one for its work, each for itself."""

    def __init__(self, first: int, each: int) -> None:
        self._first = first
        self._each = each
        self.replayed = 0

    def recorder(self) -> Callable[[Callable[[], None]], Callable[[], None]]:
        shared: list[torch.Tensor] = []

        def record(work: Callable[[], None]) -> Callable[[], None]:
            if not shared:
                shared.append(torch.zeros(self._first, dtype=torch.uint8))
            own = torch.zeros(self._each, dtype=torch.uint8)

            def replay() -> None:
                assert len(own) == self._each
                self.replayed += 1
                work()

            return replay

        return record

    def forward(self, loaded: LoadedModel, _config: EngineConfig, attention: Any, _progress: Progress) -> Forward:
        """Replaces `engine.parts.make_forward`, with a compiler that changes nothing."""
        forward = DeviceForward(loaded, attention, self.recorder, lambda module: module)
        forward.start(60.0, silent)
        return forward
