"""Masks as tensors of forbidden tokens."""

from typing import Final

import numpy as np
import torch

from engine.device_copy import to_device
from engine.sampling.allowed import Words, bits_of

BYTE: Final = (1, 2, 4, 8, 16, 32, 64, 128)


def banned_tokens(allowed: Words, vocab: int, device: torch.device) -> torch.Tensor:
    """bool [len(allowed), vocab] on `device`, of tokens whose bit is not set.

    A device gets the words, an eighth of the bytes, and unpacks them.
    """
    if device.type == "cpu":
        return torch.from_numpy(bits_of(~allowed, vocab))
    return unpacked(to_device((~allowed).astype("<u4", copy=False).view(np.uint8), device), vocab)


def unpacked(packed: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [B, vocab] of uint8 [B, ceil(vocab / 8) or more], lowest bit first."""
    bits = to_device(np.array(BYTE, dtype=np.uint8), packed.device)
    return packed.unsqueeze(-1).bitwise_and(bits).ne(0).flatten(1)[:, :vocab]
