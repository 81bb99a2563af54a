"""Guess tokens by prompt lookup: what followed the same last tokens earlier in the text.

Source: Saxena 2023, "Prompt lookup decoding", github.com/apoorvumang/prompt-lookup-decoding. Verification: Leviathan et
al. 2023, arXiv:2211.17192.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NGRAM: Final = 3  # most tokens to look up
FIRST_CHANCE: Final = 0.3  # of a guess, before any was seen
LEARNING: Final = 0.15  # weight of the latest guess
SELDOM: Final = 4  # steps from one lookup to the next while no guess is likely enough, as a lookup takes time, too
FIRST_CAPACITY: Final = 256  # tokens


class PromptLookup:
    """Implements `engine.scheduler.request.Drafter`.

    It learns how often guesses are right, for each number of equal tokens before them. Each token that was drawn shows that,
    also where the guess was no draft.
    """

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        """`tokens` is extended by the request. `most`: drafts of a step."""
        self._tokens = tokens
        self._most = most
        self._chances = [FIRST_CHANCE] * (NGRAM + 1)  # by equal tokens
        self._guess: Sequence[int] = ()  # at what follows the text of the latest lookup
        self._size = 0  # equal tokens before it
        self._unlikely = 0  # calls in which no guess could be likely enough
        self._text: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._copied = 0  # leading tokens in `_text`

    def drafts(self, most: int, least_chance: float) -> Sequence[int]:
        most = min(self._most, most)
        if most <= 0:
            self._guess = ()
            return ()
        if max(self._chances) < least_chance:
            self._unlikely += 1
            if self._unlikely % SELDOM:
                return ()
        before = self._copied
        text = self._updated()
        self._learn(text[before:].tolist() if before else ())
        found, self._size = latest_match(text)
        if not self._size:
            self._guess = ()
            return ()
        repeated = text[found:][: self._most].tolist()
        self._guess = [repeated[i % len(repeated)] for i in range(self._most)]
        count, chance = 0, self._chances[self._size]
        right = chance  # all drafts so far
        while count < most and right >= least_chance:
            count += 1
            right *= chance
        return self._guess[:count]

    def _learn(self, drawn: Sequence[int]) -> None:
        for guessed, token in zip(self._guess, drawn, strict=False):
            self._chances[self._size] += LEARNING * ((guessed == token) - self._chances[self._size])
            if guessed != token:
                return

    def _updated(self) -> npt.NDArray[np.int32]:
        length = len(self._tokens)
        if length > len(self._text):
            grown = np.empty(max(FIRST_CAPACITY, 2 * length), np.int32)
            grown[: self._copied] = self._text[: self._copied]
            self._text = grown
        self._text[self._copied : length] = self._tokens[self._copied :]
        self._copied = length
        return self._text[:length]


def latest_match(text: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Find the latest earlier occurrence of the last tokens, of as many as possible.

    Returns: the index behind it, and the number of its tokens, at most NGRAM; 0: even the last token is new.
    """
    last = len(text) - 1
    places, found = np.flatnonzero(text[:last] == text[last]) if last > 0 else np.empty(0, int), (0, 0)
    for size in range(1, NGRAM + 1):
        if not len(places):
            break
        found = int(places[-1]) + 1, size
        if last < size:
            break
        places = places[places >= size]
        places = places[text[places - size] == text[last - size]]
    return found
