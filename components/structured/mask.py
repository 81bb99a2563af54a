"""The tokens that a constraint allows next, for one branch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from components.structured.grammar import fault_of


@dataclass(slots=True, eq=False)
class Wear:
    """Use of one compilation. Copies of a matcher share its lexer, which grows with every text.

    If it is full, or a step was too expensive, all copies fail.
    """

    num_tokens: int = 0
    has_failed: bool = False


class GrammarMask:
    """A `TokenMask` of `engine.ports`. `fill` takes 15 us and `accept` 3 us, both without the GIL."""

    __slots__ = ("_matcher", "_num_words", "_wear")

    def __init__(self, matcher: LLMatcher, num_words: int, wear: Wear | None = None) -> None:
        """`num_words`: length of the bit mask in words of 32 tokens."""
        self._matcher = matcher
        self._num_words = num_words
        self._wear = wear or Wear()

    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        """Set the bits of allowed next tokens, also end tokens if the text may end."""
        if len(allowed) == self._num_words:
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
            return
        known = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(allowed)]
        allowed[: len(known)] = known
        allowed[len(known) :] = 0  # ids without a token

    def accept(self, token_id: int) -> None:
        self._wear.num_tokens += 1
        if not self._matcher.consume_token(token_id):
            self._wear.has_failed = True

    def allows(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def fork(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._num_words, self._wear)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str | None:
        return fault_of(self._matcher)
