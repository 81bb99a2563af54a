"""What a constraint allows next, for one branch of one request."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from components.structured.grammar import fault_of


@dataclass(slots=True, eq=False)
class Wear:
    """What texts have done to one compilation. Copies of a matcher share its lexer, which learns from every text: it grows.

    Once it is full, or a step of one text was too much for it, it fails all who share it, then and later.
    """

    num_tokens: int = 0
    has_failed: bool = False


class GrammarMask:
    """A `TokenMask` of `engine.ports`. Some 15 us to fill and 3 to accept; the GIL is free meanwhile."""

    __slots__ = ("_matcher", "_num_words", "_wear")

    def __init__(self, matcher: LLMatcher, num_words: int, wear: Wear | None = None) -> None:
        """`num_words`: of 32 tokens each, in the vocabulary that the matcher was made for; `wear`: its compilation's."""
        self._matcher = matcher
        self._num_words = num_words
        self._wear = wear or Wear()

    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        """Set the bits of what may come; when nothing may, of the end."""
        if len(allowed) == self._num_words:
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
            return
        known = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(allowed)]
        allowed[: len(known)] = known
        allowed[len(known) :] = 0  # ids that the tokenizer has no token for

    def accept(self, token_id: int) -> None:
        """The token that was drawn."""
        self._wear.num_tokens += 1
        if not self._matcher.consume_token(token_id):
            self._wear.has_failed = True

    def fork(self) -> Self:
        """One for another branch that has got as far."""
        return type(self)(self._matcher.deep_copy(), self._num_words, self._wear)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str | None:
        """Why the text cannot be brought to an end that satisfies the constraint."""
        return fault_of(self._matcher)
