"""What the mock says where a mask leaves it a choice."""

from typing import Final

import numpy as np

from engine.sampling.allowed import allowed_words, bits_of
from engine.sampling.row import Row

FEW: Final = 24


def draw_masked(row: Row, vocab_size: int, drawn: int, *, ends: bool) -> int:
    """One of the tokens that `row` may have next, the same for the same `drawn`, 32 bits; an end where it `ends` or must.

    With a taste for texts that come to an end: of many tokens for low ids, where vocabularies have quotes, of a few bytes for
    high ones, which are brackets that close rather than white space.
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
