"""What a rank has of one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges along one dimension: several if the tensor holds several matrices, one after the other."""

    dim: int
    ranges: tuple[range, ...]
    whole: int  # size of the dimension, of all ranks

    @property
    def length(self) -> int:
        return sum(map(len, self.ranges))

    def of(self, tensor: Any) -> torch.Tensor:
        """Read the part of a tensor, or of one in a file.

        Returns: contiguous; perhaps a view.
        """
        before = (slice(None),) * self.dim
        pieces = [tensor[(*before, slice(own.start, own.stop))] for own in self.ranges]
        joined: torch.Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)
        return joined.contiguous()  # columns of a mapped file would keep the whole in memory

    def parameter(self, whole: torch.Tensor) -> torch.nn.Parameter:
        """A copy of the part."""
        return torch.nn.Parameter(self.of(whole.detach()).clone(), requires_grad=False)

    def fitted(self, name: str, shape: Sequence[int], dims: int) -> "Part":
        """Return the part of a tensor that a file has without the first dimensions, or as one matrix of several.

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
        raise UnsupportedModel(f"tensor_parallel: {name} has the shape {list(shape)}, of which no rank can read a part")


def share(size: int, rank: int, ranks: int) -> range:
    """A rank's range of `size`, which `ranks` divides."""
    length = size // ranks
    return range(rank * length, (rank + 1) * length)


def packed(matrices: Sequence[tuple[int, range]]) -> tuple[range, ...]:
    """Ranges in a matrix of several, each given by its number of rows and the range of them."""
    ranges, start = [], 0
    for rows, own in matrices:
        ranges.append(range(start + own.start, start + own.stop))
        start += rows
    return tuple(ranges)
