"""The mock engine's choice among allowed tokens."""

from typing import Final

import numpy as np

from engine.sampling.allowed import allowed_words, bits_of
from engine.sampling.row import Row

FEW: Final = 24


def draw_masked(row: Row, vocab_size: int, drawn: int, *, ends: bool) -> int:
    """Choose an allowed token by the 32 bits `drawn`; an end token if `ends` is set or nothing else is allowed.

    So that texts end, it prefers low ids (quotes) among many tokens and high ids (closing brackets) among few.
    """
    (allowed,) = bits_of(allowed_words([row], vocab_size), vocab_size)
    may_end = [token_id for token_id in row.eos_ids if allowed[token_id]]
    allowed[row.eos_ids] = False
    others = np.flatnonzero(allowed)
    if may_end and (ends or not len(others)):
        return may_end[0]
    share = drawn / 2**32
    if len(others) <= FEW:
        return int(others[-1 - int(len(others) * share**3)])
    return int(others[int(len(others) * share**8)])
