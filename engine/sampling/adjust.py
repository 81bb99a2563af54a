"""Penalties, bias and masks on logits."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.device.copies import to_device
from engine.sampling.allowed import Words, allowed_words, bits_of
from engine.sampling.penalties import Penalties
from engine.sampling.row import Row

Numbered = Sequence[tuple[int, Row]]  # rows with their indices in the batch


class Adjustments:
    def __init__(self, rows: Sequence[Row], vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        numbered = [(i, row) for i, row in enumerate(rows) if row.adjusts]
        penalised = [(i, row) for i, row in numbered if row.penalised]
        self._penalties = Penalties(penalised, vocab, device) if penalised else None
        biased = [(i, row) for i, row in numbered if row.params.logit_bias]
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if biased:
            values = np.array([value for _, row in biased for _, value in row.params.logit_bias], dtype=np.float32)
            where = self._flat(biased, lambda row: [token for token, _ in row.params.logit_bias])
            self._bias = where, to_device(values, device)
        self._masked = [(i, row) for i, row in numbered if row.mask is not None]
        self._masked_index = to_device([i for i, _ in self._masked], device, torch.int64)
        self._all_masked = len(self._masked) == len(rows)
        self._must_go_on = [(i, row) for i, row in numbered if row.mask is None and row.params.min_tokens]

    def apply(self, logits: torch.Tensor) -> None:
        """Overwrite `logits`, contiguous float32 [B, vocab]."""
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._bias is not None:
            logits.view(-1).index_add_(0, *self._bias)
        if self._masked:
            self._mask(logits)
        if unfinished := [(i, row) for i, row in self._must_go_on if row.must_go_on]:
            logits.view(-1).index_fill_(0, self._flat(unfinished, lambda row: row.end_ids), -torch.inf)

    def _mask(self, logits: torch.Tensor) -> None:
        """Mask a whole batch in place: copying rows takes longer."""
        words = allowed_words([row for _, row in self._masked], self._vocab)
        banned = banned_tokens(words, self._vocab, self._device)
        if self._all_masked:
            logits.masked_fill_(banned, -torch.inf)
            return
        index = self._masked_index
        logits.index_copy_(0, index, logits[index].masked_fill_(banned, -torch.inf))

    def _flat(self, rows: Numbered, ids: Callable[[Row], npt.ArrayLike]) -> torch.Tensor:
        where = [np.asarray(ids(row), dtype=np.int64) + i * self._vocab for i, row in rows]
        return to_device(np.concatenate(where), self._device)


BYTE: Final = (1, 2, 4, 8, 16, 32, 64, 128)


def banned_tokens(allowed: Words, vocab: int, device: torch.device) -> torch.Tensor:
    """Unpack words on the device: they are an eighth of the bytes.

    Returns: bool [len(allowed), vocab] of tokens whose bit is not set.
    """
    if device.type == "cpu":
        return torch.from_numpy(bits_of(~allowed, vocab))
    return unpacked(to_device((~allowed).astype("<u4", copy=False).view(np.uint8), device), vocab)


def unpacked(packed: torch.Tensor, vocab: int) -> torch.Tensor:
    """Unpack bits, lowest first.

    Args:
        packed: uint8 [B, ceil(vocab / 8) or more].
    Returns: bool [B, vocab].
    """
    bits = to_device(np.array(BYTE, dtype=np.uint8), packed.device)
    return packed.unsqueeze(-1).bitwise_and(bits).ne(0).flatten(1)[:, :vocab]
