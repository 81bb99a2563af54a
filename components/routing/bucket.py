"""Send prompts of similar length to the same instance, so that short ones do not wait for long ones."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Final

from components.routing.choice import Ask, Choice, Member
from components.routing.load import Load, is_unbalanced, lowest

HISTORY: Final = 1024  # recent prompts that define short and long
LEARN_EVERY: Final = 64  # prompts
BALANCE_ABS_TOKENS: Final = 16384
BALANCE_REL: Final = 1.5


class Bucket:
    """Instance `floor(n * share)` of n, where `share` is the part of all prompt tokens that belongs to shorter
    prompts.

    So instances have ranges of length with equally many tokens, which follow recent prompts. Equally long prompts
    are placed at random within their share. Without history, or with unbalanced load, the least loaded instance is
    chosen.
    """

    def __init__(
        self,
        rng: Random,
        load: Load,
        balance_abs_tokens: float = BALANCE_ABS_TOKENS,
        balance_rel: float = BALANCE_REL,
    ) -> None:
        self._rng = rng
        self._load = load
        self._absolute = balance_abs_tokens
        self._relative = balance_rel
        self._lengths: deque[int] = deque(maxlen=HISTORY)
        self._learned = 0  # prompts since the boundaries were computed
        self._sorted: list[int] = []
        self._below: list[int] = [0]  # tokens in the first i of them

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        if not ask.dry:
            self._learn(max(ask.num_tokens, 1))
        loads = [self._load(m, 0) for m in members]
        if not self._sorted or is_unbalanced(loads, self._absolute, self._relative):
            why = "least load: " + ("the fleet is unbalanced" if self._sorted else "no lengths are known")
            return Choice(members[lowest(loads, self._rng)], why)
        share = self._share(ask.num_tokens)
        chosen = members[min(int(share * len(members)), len(members) - 1)]
        return Choice(chosen, f"{share:.0%} of all tokens are in shorter prompts")

    def _learn(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._learned += 1
        if self._learned >= LEARN_EVERY:
            self._learned = 0
            self._sorted = sorted(self._lengths)
            self._below = [0, *accumulate(self._sorted)]

    def _share(self, tokens: int) -> float:
        shorter = self._below[bisect_left(self._sorted, tokens)]
        not_longer = self._below[bisect_right(self._sorted, tokens)]
        return (shorter + self._rng.random() * (not_longer - shorter)) / self._below[-1]
