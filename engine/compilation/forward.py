"""A model's forward: eager, or from a compiled package."""

from pathlib import Path
from typing import Any, Final, Protocol

import torch

from engine.attention.backend import StepAttention
from engine.attention.cpu import CpuStep
from engine.kernels.linear import is_packed
from engine.kernels.native_library import load_package_class

# torch specialises a dimension of size 1
MIN_TOKENS: Final = 2
LIBRARY: Final = "forward.so"  # in a package, which is a directory


class Forward(Protocol):
    @property
    def kind(self) -> str:
        pass

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """Return logits [K, vocab] of the tokens at `keep` [K]. `token_ids` and `positions` are int64 [T]."""


class EagerForward:
    kind: Final = "eager"

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        output = self._module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            step_attention=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class Exported(torch.nn.Module):
    """The forward of tensors alone, for export."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._eager = EagerForward(module)
        self.module = module  # registers the parameters

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        pool: torch.Tensor,
        plan: torch.Tensor,
    ) -> torch.Tensor:
        return self._eager(token_ids, positions, keep, CpuStep(pool, plan))


class PackagedForward:
    """A package, for steps of the C++ kernel. It runs without the GIL."""

    kind: Final = "compiled"

    def __init__(self, path: Path, module: Any, state_dir: Path) -> None:
        """Raises: KernelsUnavailable; RuntimeError, for a directory that is not a package."""
        load_package_class(state_dir)
        self._package = torch.classes.kvmesh_package.Package(str(path / LIBRARY))
        if not has_own_weights(module):
            exported = Exported(module)
            there = dict([*exported.named_parameters(remove_duplicate=False), *exported.named_buffers()])
            self._weights = {name: there[name].detach() for name in self._package.weights()}  # keeps the tensors alive
            self._package.use(list(self._weights), list(self._weights.values()))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        assert isinstance(step, CpuStep), "packages are for the C++ kernel's steps"
        inputs = [padded(token_ids), padded(positions), padded(keep), step.pool, step.plan]
        logits: torch.Tensor = self._package.run(inputs)[0]
        return logits[: len(keep)]


def has_own_weights(module: torch.nn.Module) -> bool:
    """Return whether a package has its own weights. Packed ones are shared with the module."""
    return not is_packed(module)


def padded(values: torch.Tensor) -> torch.Tensor:
    """Pad to `MIN_TOKENS` with zeros, which the plan ignores."""
    missing = MIN_TOKENS - len(values)
    return torch.nn.functional.pad(values, (0, missing)) if missing > 0 else values
