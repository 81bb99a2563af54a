"""Operators in Python, which compilers do not trace."""

from collections.abc import Callable
from typing import Final

import torch

_LIBRARY: Final = torch.library.Library("kvmesh", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(schema: str, compute: Callable[..., object], fake: Callable[..., object]) -> None:
    """Define `torch.ops.kvmesh.<name>`. `fake` returns a tensor of the result's shape, for compilers."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kvmesh::{name}", fake, lib=_LIBRARY)
