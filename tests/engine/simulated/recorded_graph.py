"""CUDA graphs of a simulated device."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

UNDEFINED: Final = 0xFF  # each byte of memory without defined contents: NaN, or -1


class RecordedGraph:
    """The operations of one graph, in order.

    Recording leaves memory as it was. A replay begins with undefined contents in the memory of all graphs that share it,
    because another graph may have used it since.

    Args:
        pool: graphs with the same one share memory.
    """

    def __init__(self, pool: object) -> None:
        self.pool = pool
        self._thread = threading.get_ident()
        self._work: list[Callable[[], None]] = []
        self._own: dict[int, torch.Tensor] = {}  # memory that recorded operations allocated, by address
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # other memory that they wrote; its contents

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def will_write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the contents of `tensors`."""
        for memory in map(memory_of, tensors):
            if memory.data_ptr() not in self._own:
                self._before.setdefault(memory.data_ptr(), (memory, memory.clone()))

    def add(self, work: Callable[[], Any], given: Any, made: Any, *, writes: bool) -> None:
        """Add an operation that returned `made`, which may be views of `given`."""
        known = {memory_of(tensor).data_ptr() for tensor in _tensors(given)}
        outs = _tensors(made)
        new = {memory_of(out).data_ptr(): memory_of(out) for out in outs} if outs else {}
        new = {address: memory for address, memory in new.items() if address not in known}
        self._own |= new

        def again() -> None:
            values = _tensors(work())
            if new:
                for out, value in zip(outs, values, strict=True):
                    out.copy_(value)

        if new or writes:
            self._work.append(again)

    def end(self) -> None:
        """End the recording."""
        for memory, contents in self._before.values():
            memory.copy_(contents)
        self.forget()

    def forget(self) -> None:
        for memory in self._own.values():
            memory.fill_(UNDEFINED)

    def replay(self) -> None:
        for again in self._work:
            again()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the allocation that `tensor` is in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]
