"""The tokens that a batch's masks allow."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.sampling.row import Row

WORD_BITS: Final = 32

Words = npt.NDArray[np.uint32]


def allowed_words(rows: Sequence[Row], vocab: int) -> Words:
    """Return the allowed tokens of `rows`, which all have a mask: at least one for each row.

    End tokens are excluded before `min_tokens` and with `ignore_eos`, unless only they are allowed.
    A mask that allows nothing counts as allowing the end tokens.

    Returns: bits, [len(rows), ceil(vocab / 32)].
    """
    filled = np.empty((len(rows), -(-vocab // WORD_BITS)), dtype=np.int32)
    for signed, row in zip(filled, rows, strict=True):
        assert row.mask is not None
        row.mask.fill(signed)
    allowed = filled.view(np.uint32)
    if vocab % WORD_BITS:
        allowed[:, -1] &= np.uint32((1 << vocab % WORD_BITS) - 1)
    for i in np.flatnonzero(~allowed.any(axis=1)).tolist():
        _set(allowed[i], rows[i].eos_ids)
    for words, row in zip(allowed, rows, strict=True):
        ends = [*(row.eos_ids if row.params.ignore_eos else ()), *(row.end_ids if row.must_go_on else ())]
        if ends:
            as_filled = words.copy()
            _clear(words, ends)
            if not words.any():
                words[:] = as_filled
    # without an end token, any token is better than an invalid id
    allowed[~allowed.any(axis=1)] = ~np.uint32(0)
    return allowed


def bits_of(words: Words, vocab: int) -> npt.NDArray[np.bool_]:
    """Return bools [len(words), vocab]."""
    as_bytes = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(as_bytes, axis=1, count=vocab, bitorder="little").view(np.bool_)


def all_but(token_ids: Sequence[int], vocab: int) -> Words:
    """Return words [ceil(vocab / 32)] with the bits of all tokens but `token_ids`."""
    words = np.full(-(-vocab // WORD_BITS), ~np.uint32(0))
    _clear(words, token_ids)
    return words


def _set(words: Words, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _clear(words: Words, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        words[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
