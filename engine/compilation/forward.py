"""The model's forward as a runner calls it: eager, or from a package compiled ahead of time."""

from pathlib import Path
from typing import Any, Final, Protocol

import torch

from engine.attention.backend import StepAttention
from engine.attention.cpu import CpuStep
from engine.kernels.build import load_package_class
from engine.kernels.linear import is_packed

# A dimension that may be 1 is compiled for 1 and again for the rest. With two at least, one graph does for all.
MIN_TOKENS: Final = 2


class Forward(Protocol):
    """One step through the model."""

    @property
    def kind(self) -> str:
        """How the latest step ran: eager, compiled, graph."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """Logits [K, vocab] of the tokens at `keep` [K]; `token_ids` and `positions` are int64 [T]."""


class EagerForward:
    """transformers' module, operator by operator."""

    kind: Final = "eager"

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """See `Forward`."""
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
    """The forward as it is exported: tensors in, one tensor out, attention an operator that is given pool and plan."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._eager = EagerForward(module)
        self.module = module  # so that export finds the parameters

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        pool: torch.Tensor,
        plan: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the tokens at `keep`."""
        return self._eager(token_ids, positions, keep, CpuStep(pool, plan))


class PackagedForward:
    """A package that `engine.compilation.build` made, loaded: no tracing, no guards, and no lock of Python's while it runs.

    Steps of more than `max_tokens` tokens are not for it, nor those of other attention than the C++ kernel.
    """

    kind: Final = "compiled"

    def __init__(self, path: Path, module: Any, state_dir: Path) -> None:
        """Load the package at `path`, whose weights are those of `module` unless it has its own.

        Raises: KernelsUnavailable; RuntimeError, for a file that is no package.
        """
        load_package_class(state_dir)
        self._package = torch.classes.kvmesh_package.Package(str(path))
        if not has_own_weights(module):
            exported = Exported(module)
            there = dict([*exported.named_parameters(remove_duplicate=False), *exported.named_buffers()])
            self._weights = {name: there[name].detach() for name in self._package.weights()}  # to keep them alive
            self._package.use(list(self._weights), list(self._weights.values()))

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """See `Forward`."""
        assert isinstance(step, CpuStep), "packages are for the C++ kernel's steps"
        inputs = [padded(token_ids), padded(positions), padded(keep), step.pool, step.plan]
        logits: torch.Tensor = self._package.run(inputs)[0]
        return logits[: len(keep)]


def has_own_weights(module: torch.nn.Module) -> bool:
    """Whether a package of `module` has a copy of its weights, packed for a library, because they are not packed yet."""
    return not is_packed(module)


def padded(values: torch.Tensor) -> torch.Tensor:
    """With zeros, to what the graph takes at least: token 0 at position 0, which is none of the plan's."""
    missing = MIN_TOKENS - len(values)
    return torch.nn.functional.pad(values, (0, missing)) if missing > 0 else values
