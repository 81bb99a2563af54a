"""Linear layers that change each row of a step by its own adapter, or by none.

Row groups are set per thread, beside the forward, so one compiled forward serves all steps.
Rows without an adapter have the same bits as without any loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class LowRank:
    """Change of one layer by one adapter: up (down x).

    Source: LoRA, Hu et al. 2021, arXiv:2106.09685.
    """

    down: torch.Tensor  # [rank, in], PEFT's lora_A
    up: torch.Tensor  # [out, rank], PEFT's lora_B times the scale


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: slice | torch.Tensor  # int64 [N], or a slice of neighbours
    changes: Sequence[LowRank | None]  # by site


_groups: ContextVar[Sequence[RowGroup]] = ContextVar("kvmesh_lora", default=())


@contextmanager
def adapted(groups: Sequence[RowGroup]) -> Iterator[None]:
    """Apply disjoint groups to forwards on this thread."""
    token = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(token)


def any_adapted() -> bool:
    return bool(_groups.get())


class AdaptedLinear(torch.nn.Module):
    """A linear layer whose changes adapters keep by `site`."""

    def __init__(self, plain: torch.nn.Linear, site: int) -> None:
        super().__init__()
        self.plain = plain
        self._site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(x)
        if torch.compiler.is_compiling():
            torch.ops.kvmesh.adapt(y, x, self._site)
        else:
            _adapt(y, x, self._site)
        return y


def _adapt(y: torch.Tensor, x: torch.Tensor, site: int) -> None:
    for group in _groups.get():
        change = group.changes[site]
        if change is None:
            continue
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if isinstance(group.rows, slice):
            flat_y[group.rows].addmm_(linear(flat_x[group.rows], change.down), change.up.t())
        else:
            narrow = linear(flat_x.index_select(0, group.rows), change.down)
            flat_y.index_add_(0, group.rows, linear(narrow, change.up))


def _adapt_nothing(_y: torch.Tensor, _x: torch.Tensor, _site: int) -> None:
    pass


_LIBRARY: Final = torch.library.Library("kvmesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("adapt(Tensor(a!) y, Tensor x, int site) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("adapt", _adapt, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kvmesh::adapt", _adapt_nothing, lib=_LIBRARY)
