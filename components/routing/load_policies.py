"""Policies that use at most the load. docs/routing.md has formulas and advice."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
from random import Random

from components.routing.choice import Ask, Choice, Member
from components.routing.load import Load, cost_table, lowest

_id = attrgetter("instance_id")


class RoundRobin:
    """In the order of instance ids.

    The last id, unlike a count, keeps turns fair when instances come and go.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        at = bisect_right(members, self._last, key=_id)
        chosen = members[at] if at < len(members) else members[0]
        if not ask.dry:
            self._last = chosen.instance_id
        return Choice(chosen, "its turn")


class RandomChoice:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        return Choice(self._rng.choice(members), "drawn") if members else None


class PowerOfTwo:
    """The less loaded of two random instances.

    Routers with the same outdated reports do not all choose the same one.
    Source: Azar et al. 1994; Mitzenmacher 2001, "The power of two choices in randomized load balancing".
    """

    def __init__(self, rng: Random, load: Load) -> None:
        self._rng = rng
        self._load = load

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if len(members) < 2:
            return Choice(members[0], "the only one") if members else None
        one = int(self._rng.random() * len(members))
        other = int(self._rng.random() * (len(members) - 1))
        pair = members[one], members[other + (other >= one)]
        costs = [self._load(m, ask.num_tokens) for m in pair]
        less = costs[1] < costs[0]
        why = f"load {costs[less]:.0f} against {costs[not less]:.0f}"
        return Choice(pair[less], why, cost_table(pair, costs) if ask.explain else None)


class LeastLoad:
    """The smallest `load - overlap * cached tokens`; ties are broken at random.

    The load includes this prompt; `overlap` is what one cached token saves.
    """

    def __init__(self, rng: Random, load: Load, overlap: float = 0.0) -> None:
        self._rng = rng
        self._load = load
        self._overlap = overlap

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        load, tokens, overlap = self._load, ask.num_tokens, self._overlap
        if overlap and cached:
            costs = [load(m, tokens) - overlap * min(cached.get(m.instance_id, 0), tokens) for m in members]
        else:
            costs = [load(m, tokens) for m in members]
        at = lowest(costs, self._rng)
        why = f"cost {costs[at]:.0f}, {cached.get(members[at].instance_id, 0)} of {tokens} tokens cached"
        return Choice(members[at], why, cost_table(members, costs) if ask.explain else None)
