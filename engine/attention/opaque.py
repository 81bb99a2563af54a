"""Attention as one operator that a compiler does not trace: `torch.ops.kvmesh.attend`.

A compiled or recorded forward runs for every step, so the step cannot be its argument. `attending` sets it for the
calling thread, which keeps engines on other threads apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch

from engine.attention.backend import Scoring, StepAttention


@dataclass(frozen=True, slots=True)
class _Current:
    step: StepAttention
    num_tokens: int  # tokens of the step; the forward may have more, as padding


_current: ContextVar[_Current] = ContextVar("kvmesh_attention")


@contextmanager
def attending(step: StepAttention, num_tokens: int) -> Iterator[None]:
    """Let `kvmesh::attend` on this thread attend with `step` to the first `num_tokens` tokens."""
    token = _current.set(_Current(step, num_tokens))
    try:
        yield
    finally:
        _current.reset(token)


class OpaqueAttention:
    """A `StepAttention` that calls the operator."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        told = scoring.scaling, scoring.window, scoring.softcap
        attended: torch.Tensor = torch.ops.kvmesh.attend(query, key, value, layer, *told)
        return attended


def _attend(  # noqa: PLR0917 - the order of the schema below
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    current = _current.get()
    scoring = Scoring(scaling, window, softcap)
    length, num_tokens = query.shape[2], current.num_tokens
    if length == num_tokens:
        return current.step.attend(layer, query, key, value, scoring).contiguous()
    out = _like_output(query).zero_()
    query, key, value = (tensor[:, :, :num_tokens] for tensor in (query, key, value))
    out[:, :num_tokens] = current.step.attend(layer, query, key, value, scoring)
    return out


def _like_output(query: torch.Tensor, *_others: object) -> torch.Tensor:
    """[1, T, heads, head_dim], contents undefined."""
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


_LIBRARY: Final = torch.library.Library("kvmesh", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int window, float softcap) -> Tensor"
)  # type: ignore[no-untyped-call]
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kvmesh::attend", _like_output, lib=_LIBRARY)
