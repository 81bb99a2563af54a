"""A rank's part of one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges along one dimension; several if the tensor is a concatenation of matrices."""

    dim: int
    ranges: tuple[range, ...]
    whole: int  # size for all ranks together

    @property
    def length(self) -> int:
        return sum(map(len, self.ranges))

    def of(self, tensor: Any) -> torch.Tensor:
        """Read the part of a tensor in memory or in a file: contiguous, perhaps a view."""
        before = (slice(None),) * self.dim
        pieces = [tensor[(*before, slice(own.start, own.stop))] for own in self.ranges]
        joined: torch.Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)
        return joined.contiguous()  # a view of columns would keep the whole mapped file in memory

    def parameter(self, whole: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.of(whole.detach()).clone(), requires_grad=False)

    def fitted(self, name: str, shape: Sequence[int], dims: int) -> "Part":
        """Return the part for a tensor that is stored without the first dimensions, or as one matrix of several.

        Args:
            shape: in the file.
            dims: number of dimensions in the model.
        Raises: UnsupportedModel, for other differences.
        """
        dim = self.dim - (dims - len(shape))
        for ranges in (self.ranges, self.ranges[:1]):
            whole = self.whole * len(ranges) // len(self.ranges)
            if dim >= 0 and shape[dim] == whole:
                return Part(dim, ranges, whole)
        raise UnsupportedModel(
            f"tensor_parallel: {name} has the shape {list(shape)}, which cannot be divided over ranks"
        )


def share(size: int, rank: int, ranks: int) -> range:
    """Return a rank's range of `size`, which is divisible by `ranks`."""
    length = size // ranks
    return range(rank * length, (rank + 1) * length)


def packed(matrices: Sequence[tuple[int, range]]) -> tuple[range, ...]:
    """Return ranges in a concatenation of matrices, each given by its rows and a range of them."""
    ranges, start = [], 0
    for rows, own in matrices:
        ranges.append(range(start + own.start, start + own.stop))
        start += rows
    return tuple(ranges)
