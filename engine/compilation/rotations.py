"""Rotary embeddings: sines and cosines that are computed once a step.

On a GPU inductor would inline them into a kernel of each layer, which would compute them again for every head.
"""

import operator
from typing import Final

import torch

ROTATIONS: Final = ("cos", "sin")


def keep_rotations(graph: torch.fx.Graph) -> int:
    """Let the sines and cosines in `graph`, as torch.compile traced it, be tensors of their own.

    Returns: how many there are.
    """
    found = [node for node in graph.nodes if node.op == "call_method" and node.target in ROTATIONS]
    for node in found:
        ready = _scaled_and_cast(node)
        with graph.inserting_after(ready):
            kept = graph.call_function(torch.ops.kvmesh.keep.default, (ready,))
        for user in list(ready.users):
            if user is not kept:
                user.replace_input_with(ready, kept)
    return len(found)


def _scaled_and_cast(node: torch.fx.Node) -> torch.fx.Node:
    """The node behind factors and a change of type that all users share."""
    while len(node.users) == 1:
        (user,) = node.users
        is_factor = user.target is operator.mul and not isinstance(user.args[1], torch.fx.Node)
        if not is_factor and not (user.op == "call_method" and user.target == "to"):
            break
        node = user
    return node


_LIBRARY: Final = torch.library.Library("kvmesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("keep(Tensor tensor) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("keep", torch.clone, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("kvmesh::keep", torch.empty_like, lib=_LIBRARY)
