"""Guess tokens by prompt lookup: what followed the same last tokens earlier in the text.

Source: Saxena 2023, "Prompt lookup decoding", github.com/apoorvumang/prompt-lookup-decoding. Verification: Leviathan et
al. 2023, arXiv:2211.17192.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NGRAMS: Final = (3, 2)  # tokens to look up, the longest first
FIRST_CAPACITY: Final = 256  # tokens


class PromptLookup:
    """Implements `engine.scheduler.request.Drafter`.

    A step has twice as many drafts as the one before if all of those were accepted, else as many as were accepted.
    """

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        """`tokens` is extended by the request. `most`: drafts of a step."""
        self._tokens = tokens
        self._most = most
        self._count = most  # of the next step
        self._text: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._copied = 0  # leading tokens in `_text`

    def drafts(self, most: int) -> Sequence[int]:
        count = min(self._count, most)
        if count <= 0:
            return ()
        text = self._updated()
        for size in NGRAMS:
            found = last_match(text, size)
            if found is not None:
                repeated = text[found:][:count].tolist()
                return [repeated[i % len(repeated)] for i in range(count)]
        return ()

    def verified(self, drafted: int, accepted: int) -> None:
        self._count = min(self._most, 2 * drafted) if accepted == drafted else max(1, accepted)

    def _updated(self) -> npt.NDArray[np.int32]:
        length = len(self._tokens)
        if length > len(self._text):
            grown = np.empty(max(FIRST_CAPACITY, 2 * length), np.int32)
            grown[: self._copied] = self._text[: self._copied]
            self._text = grown
        self._text[self._copied : length] = self._tokens[self._copied :]
        self._copied = length
        return self._text[:length]


def last_match(text: npt.NDArray[np.int32], size: int) -> int | None:
    """Index behind the latest earlier occurrence of the last `size` tokens."""
    starts = len(text) - size  # earlier places
    if starts <= 0:
        return None
    equal = text[:starts] == text[starts]
    for i in range(1, size):
        equal &= text[i : starts + i] == text[starts + i]
    places = np.flatnonzero(equal)
    return int(places[-1]) + size if len(places) else None
