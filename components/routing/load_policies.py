"""Policies that compare loads or prompt lengths. docs/routing.md has formulas and advice."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from random import Random
from typing import Final

from components.routing.policy import Load, Member, PolicyChoice, RouteRequest, cost_table, is_unbalanced, lowest

_id = attrgetter("instance_id")


class RoundRobin:
    def __init__(self) -> None:
        self._last = ""  # an id, not a count: turns stay fair when the fleet changes

    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        if not members:
            return None
        at = bisect_right(members, self._last, key=_id)
        chosen = members[at] if at < len(members) else members[0]
        if not request.dry:
            self._last = chosen.instance_id
        return PolicyChoice(chosen, "its turn")


class RandomChoice:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        return PolicyChoice(self._rng.choice(members), "drawn") if members else None


class PowerOfTwo:
    """The less loaded of two random instances, so that routers with the same stale reports differ.

    Source: Mitzenmacher 2001, "The power of two choices in randomized load balancing".
    """

    def __init__(self, rng: Random, load: Load) -> None:
        self._rng = rng
        self._load = load

    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        if len(members) < 2:
            return PolicyChoice(members[0], "the only one") if members else None
        one = int(self._rng.random() * len(members))
        other = int(self._rng.random() * (len(members) - 1))
        pair = members[one], members[other + (other >= one)]
        costs = [self._load(m, request.num_tokens) for m in pair]
        less = costs[1] < costs[0]
        why = f"load {costs[less]:.0f} against {costs[not less]:.0f}"
        return PolicyChoice(pair[less], why, cost_table(pair, costs) if request.explain else None)


class LeastLoad:
    """Minimise `load - overlap * cached tokens`."""

    def __init__(self, rng: Random, load: Load, overlap: float = 0.0) -> None:
        self._rng = rng
        self._load = load
        self._overlap = overlap

    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        if not members:
            return None
        load, tokens, overlap = self._load, request.num_tokens, self._overlap
        if overlap and cached:
            costs = [load(m, tokens) - overlap * min(cached.get(m.instance_id, 0), tokens) for m in members]
        else:
            costs = [load(m, tokens) for m in members]
        at = lowest(costs, self._rng)
        why = f"cost {costs[at]:.0f}, {cached.get(members[at].instance_id, 0)} of {tokens} tokens cached"
        return PolicyChoice(members[at], why, cost_table(members, costs) if request.explain else None)


HISTORY: Final = 1024  # prompts
LEARN_EVERY: Final = 64
BALANCE_ABS_TOKENS: Final = 16384
BALANCE_REL: Final = 1.5


class Bucket:
    """Instances serve ranges of prompt length, so that short prompts do not wait for long ones.

    Without history or balance, the least loaded is chosen.
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
        self._learned = 0  # prompts since `_sorted` was made
        self._sorted: list[int] = []
        self._below: list[int] = [0]  # tokens in the first i of `_sorted`

    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        if not members:
            return None
        if not request.dry:
            self._learn(max(request.num_tokens, 1))
        loads = [self._load(m, 0) for m in members]
        if not self._sorted or is_unbalanced(loads, self._absolute, self._relative):
            why = "least load: " + ("the fleet is unbalanced" if self._sorted else "no lengths are known")
            return PolicyChoice(members[lowest(loads, self._rng)], why)
        share = self._share(request.num_tokens)
        chosen = members[min(int(share * len(members)), len(members) - 1)]
        return PolicyChoice(chosen, f"{share:.0%} of all tokens are in shorter prompts")

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
