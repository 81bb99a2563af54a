"""Weights stored as 8-bit floats or integers, which are dequantised while they are read.

The scales of a matrix `…` are `…_scale_inv` or `…_scale`: one for the matrix, one per row, or one per block. Scales of
activations, keys and values are ignored, because these are computed unquantised.
"""

from collections.abc import Mapping
from math import ceil
from types import EllipsisType
from typing import Any, Final

import torch

from engine.errors import UnsupportedModel

EIGHT_BITS: Final = ("F8_E4M3", "I8")  # safetensors' names
SCALES: Final = ("_scale_inv", "_scale")
UNUSED: Final = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")

Block = tuple[int, int]  # rows and columns that share a scale


class ScaledTensor:
    """A stored matrix [..., out, in] and its scales, with the interface of `safe_open(...).get_slice`."""

    def __init__(self, stored: Any, scales: torch.Tensor, block: Block) -> None:
        self._stored = stored
        self._scales = scales  # float32 [..., ceil(out / block[0]), ceil(in / block[1])]
        self._block = block

    def get_shape(self) -> list[int]:
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> torch.Tensor:
        shape = self.get_shape()
        parts = index if isinstance(index, tuple) else ()
        ranges = [range(size)[part] for size, part in zip(shape, (*parts, *[slice(None)] * len(shape)), strict=False)]
        numbers = self._stored[index].float()
        *before, rows, columns = (torch.tensor(numbers_of) for numbers_of in ranges)
        scales = self._scales
        for dim, chosen in enumerate((*before, rows // self._block[0], columns // self._block[1])):
            scales = scales.index_select(dim, chosen)
        return numbers.mul_(scales)


def joined(tensors: Mapping[str, Any], block: Block | None) -> dict[str, Any]:
    """Replace each matrix of 8-bit numbers in `tensors` by a `ScaledTensor`. `block`: if it has a scale for each block.

    Raises: UnsupportedModel, for scales of another shape.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    for name, tensor in tensors.items():
        scale = next((name + ending for ending in SCALES if name + ending in tensors), None)
        if scale is None or tensor.get_dtype() not in EIGHT_BITS:
            continue
        scales = found.pop(scale)[...].float()
        shape = tensor.get_shape()
        shared = _block_of(shape, list(scales.shape), block)
        if shared is None:
            raise UnsupportedModel(
                f"{name} has the shape {shape}, and its scales have {list(scales.shape)}: they are neither one for "
                f"the matrix, nor one for each row{f', nor for each block of {block[0]} by {block[1]}' if block else ''}"
            )
        found[name] = ScaledTensor(tensor, scales.reshape(_grid(shape, shared)), shared)
    return found


def _block_of(shape: list[int], scales: list[int], block: Block | None) -> Block | None:
    *before, rows, columns = shape
    matrix, row = (rows, columns), (1, columns)
    if scales == _grid(shape, matrix) or (scales in ([], [1]) and not before):
        return matrix
    if scales in ([*before, rows], _grid(shape, row)):
        return row
    return block if block is not None and scales == _grid(shape, block) else None


def _grid(shape: list[int], block: Block) -> list[int]:
    *before, rows, columns = shape
    return [*before, ceil(rows / block[0]), ceil(columns / block[1])]
