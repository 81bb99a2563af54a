"""Operators in Python, which compilers do not trace."""

from collections.abc import Callable
from typing import Final

import torch

_LIBRARY: Final = torch.library.Library("kvmesh", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(schema: str, compute: Callable[..., object], fake: Callable[..., object]) -> None:
    """`fake` returns a tensor of the result's shape, for compilers."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kvmesh::{name}", fake, lib=_LIBRARY)


def like_attended(query: torch.Tensor, *_others: object) -> torch.Tensor:
    """Return a tensor of the shape of attention's result: [1, T, heads, head_dim]."""
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
