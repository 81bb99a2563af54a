"""Attention as an operator that compilers do not trace: `torch.ops.kvmesh.attend`.

One compiled forward serves all steps, so `attending` sets the step beside it, for the calling thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import Scoring, StepAttention
from engine.kernels.operators import define_operator, like_attended


@dataclass(frozen=True, slots=True)
class _Current:
    step: StepAttention
    num_tokens: int  # without the forward's padding


_current: ContextVar[_Current] = ContextVar("kvmesh_attention")


@contextmanager
def attending(step: StepAttention, num_tokens: int) -> Iterator[None]:
    token = _current.set(_Current(step, num_tokens))
    try:
        yield
    finally:
        _current.reset(token)


class OpaqueAttention:
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        options = scoring.scaling, scoring.window, scoring.softcap
        attended: Tensor = torch.ops.kvmesh.attend(query, key, value, layer, *options, sinks)
        return attended


def _attend(  # noqa: PLR0917 - the order of the schema below
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    current = _current.get()
    scoring = Scoring(scaling, window, softcap)
    length, num_tokens = query.shape[2], current.num_tokens
    if length == num_tokens:
        return current.step.attend(layer, query, key, value, scoring, sinks=sinks).contiguous()
    out = like_attended(query).zero_()
    query, key, value = (tensor[:, :, :num_tokens] for tensor in (query, key, value))
    out[:, :num_tokens] = current.step.attend(layer, query, key, value, scoring, sinks=sinks)
    return out


define_operator(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int window, float softcap, "
    "Tensor? sinks) -> Tensor",
    _attend,
    like_attended,
)
