"""gpt-oss's experts as published, in MXFP4, which are decoded to bfloat16 while they are read.

For each matrix, `…_blocks` [experts, out, groups, 16] has two 4-bit floats per byte, the first one in the lower half.
`…_scales` [experts, out, groups] has an exponent of two for each group of 32.

Source: OCP Microscaling Formats (MX) v1.0: E2M1 elements, E8M0 scales.
"""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, Final

import torch

BLOCKS, SCALES = "_blocks", "_scales"
IN_GROUP: Final = 32
BIAS: Final = 127  # of a scale's exponent
POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # indexed by the lower three bits; the fourth is the sign
ELEMENTS: Final = (*POSITIVE, *(-value for value in POSITIVE))
# [256, 2]: both elements of a byte
PAIRS: Final = torch.tensor([(ELEMENTS[byte & 15], ELEMENTS[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16)


class Mxfp4Tensor:
    """Two stored tensors, read as one [experts, in, out], with the interface of `safe_open(...).get_slice`."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales

    def get_shape(self) -> list[int]:
        experts, out, groups, _ = self._blocks.get_shape()
        return [experts, groups * IN_GROUP, out]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> torch.Tensor:
        experts, *rest = index if isinstance(index, tuple) else (slice(None),)
        decoded = decode(self._blocks[experts], self._scales[experts])
        return decoded[(slice(None), *rest)]


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode uint8 [experts, out, groups, 16] and [experts, out, groups] to bfloat16 [experts, in, out]."""
    experts, out, groups, _ = blocks.shape
    decoded = torch.empty(experts, groups * IN_GROUP, out, dtype=torch.bfloat16)
    # one by one, because the indices take eight bytes for each byte of `blocks`
    for expert in range(experts):
        elements = PAIRS[blocks[expert].long()].view(out, groups, IN_GROUP)
        powers = torch.exp2(scales[expert].float() - BIAS).bfloat16()
        decoded[expert] = (elements * powers[:, :, None]).view(out, -1).T
    return decoded


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each pair in `tensors` by an `Mxfp4Tensor`."""
    found = dict(tensors)
    for name in tensors:
        matrix = name.removesuffix(BLOCKS)
        if matrix != name and matrix + SCALES in found:
            found[matrix] = Mxfp4Tensor(found.pop(name), found.pop(matrix + SCALES))
    return found
