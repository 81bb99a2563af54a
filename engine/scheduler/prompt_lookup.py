"""Guess the tokens that followed the same last tokens earlier in the text, or in a prediction (prompt lookup).

Source: Saxena 2023, "Prompt lookup decoding", github.com/apoorvumang/prompt-lookup-decoding. Verification: Leviathan et
al. 2023, arXiv:2211.17192.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NGRAM: Final = 3  # maximum number of last tokens to look up
FIRST_CHANCE: Final = 0.3  # assumed chance that a guess is right, before any was checked
PREDICTED_CHANCE: Final = 0.8  # the same for a prediction, because clients expect most of it to be repeated
LATEST_GUESS_WEIGHT: Final = 0.15  # in the moving average
LOOKUP_INTERVAL_STEPS: Final = 4  # while no guess is likely enough, because a lookup takes time
FIRST_CAPACITY: Final = 256  # tokens

Tokens = npt.NDArray[np.int32]


class PromptLookup:
    """Implements `engine.scheduler.request.Drafter`.

    It learns how often guesses from the text and from the prediction are right, by the number of equal tokens before them.
    """

    def __init__(self, max_drafts: int, tokens: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """`tokens`: the request's text, which the request extends."""
        self._tokens = tokens
        self.max_drafts = max_drafts
        self._own = _Guesses(FIRST_CHANCE)
        self._predicted = _Guesses(PREDICTED_CHANCE)
        self._prediction = np.array(prediction, np.int32)
        self._place = 0  # index in the prediction where the latest guess began
        self._unlikely = 0  # calls in which no guess could be likely enough
        self._text: Tokens = np.empty(0, np.int32)
        self._copied = 0  # leading tokens in `_text`

    def drafts(self, most: int, least_chance: float) -> Sequence[int]:
        most = min(self.max_drafts, most)
        if most <= 0:
            self._own.clear()
            self._predicted.clear()
            return ()
        best = max(self._own.chances)
        if len(self._prediction):
            best = max(best, *self._predicted.chances)
        if best < least_chance:
            self._unlikely += 1
            if self._unlikely % LOOKUP_INTERVAL_STEPS:
                return ()
        before = self._copied
        text = self._updated()
        drawn = text[before:].tolist() if before else ()
        guesses = self._own
        guesses.learn(drawn)
        found, size = latest_match(text)
        repeated = text[found:][: self.max_drafts].tolist() if size else []
        guesses.guess([repeated[i % len(repeated)] for i in range(self.max_drafts)] if size else (), size)
        if len(self._prediction):
            self._predict(text, drawn)
            guesses = max(guesses, self._predicted, key=lambda of: of.chance)
        return guesses.likely(most, least_chance)

    def _predict(self, text: Tokens, drawn: Sequence[int]) -> None:
        """Guess from the prediction. A match after the last one is more likely than one before it.

        If at most one token matches, assume that the drawn tokens replaced as many of the prediction.
        """
        guesses = self._predicted
        right = guesses.learn(drawn)
        found, size = next_match(self._prediction, text, self._place + max(0, right - 1))
        if size < 2 and drawn and (not size or guesses.chances[0] > guesses.chances[size]):
            found, size = self._place + len(drawn), 0
        elif not size:
            guesses.clear()
            return
        self._place = found
        guesses.guess(self._prediction[found:][: self.max_drafts].tolist(), size)

    def _updated(self) -> Tokens:
        length = len(self._tokens)
        if length > len(self._text):
            grown = np.empty(max(FIRST_CAPACITY, 2 * length), np.int32)
            grown[: self._copied] = self._text[: self._copied]
            self._text = grown
        self._text[self._copied : length] = self._tokens[self._copied :]
        self._copied = length
        return self._text[:length]


class _Guesses:
    """The latest guess of the next tokens, and how often guesses were right."""

    __slots__ = ("_size", "_tokens", "chances")

    def __init__(self, first_chance: float) -> None:
        self.chances = [first_chance] * (NGRAM + 1)  # by equal tokens before the guess
        self.clear()

    @property
    def chance(self) -> float:
        """The chance that the guess's first token is right; 0 without a guess."""
        return self.chances[self._size] if self._tokens else 0.0

    def clear(self) -> None:
        self.guess((), 0)

    def guess(self, tokens: Sequence[int], size: int) -> None:
        """`size`: the number of equal tokens before the guess."""
        self._tokens, self._size = tokens, size

    def learn(self, drawn: Sequence[int]) -> int:
        """Return how many tokens of the guess were right."""
        right = 0
        for guessed, token in zip(self._tokens, drawn, strict=False):
            self.chances[self._size] += LATEST_GUESS_WEIGHT * ((guessed == token) - self.chances[self._size])
            if guessed != token:
                break
            right += 1
        return right

    def likely(self, most: int, least_chance: float) -> Sequence[int]:
        """Return at most `most` leading tokens, each of which is likely enough together with all before it."""
        count, chance = 0, self.chance
        right = chance  # that all tokens so far are right
        while count < min(most, len(self._tokens)) and right >= least_chance:
            count += 1
            right *= chance
        return self._tokens[:count]


def latest_match(text: Tokens) -> tuple[int, int]:
    """Find the latest earlier occurrence of as many last tokens as possible.

    Returns: the index after it, and its length.
    """
    places, size = _places(text[:-1], text)
    return (int(places[-1]) + 1, size) if size else (0, 0)


def next_match(prediction: Tokens, text: Tokens, start: int) -> tuple[int, int]:
    """Find as many last tokens of `text` as possible in `prediction`: at or behind index `start`, or else the first.

    Returns: as `latest_match`.
    """
    places, size = _places(prediction, text)
    if not size:
        return 0, 0
    behind = places[places >= start]
    return int((behind if len(behind) else places)[0]) + 1, size


def _places(within: Tokens, text: Tokens) -> tuple[npt.NDArray[np.intp], int]:
    """Return where as many last tokens of `text` as possible, at most NGRAM, end in `within`, and their number."""
    places = np.flatnonzero(within == text[-1]) if len(text) else np.empty(0, np.intp)
    found, size = places, 0
    while len(places) and size < NGRAM:
        found, size = places, size + 1
        if size == len(text):
            break
        places = places[places >= size]
        places = places[within[places - size] == text[-1 - size]]
    return found, size
