"""The SGLang router's rule: the longest cached prefix while the fleet is balanced, else the shortest queue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from components.routing.choice import Ask, Choice, Member
from components.routing.load import cost_table, is_unbalanced, lowest


@dataclass(frozen=True, slots=True)
class CacheAwareThresholds:
    cache_threshold: float = 0.3  # of the prompt; a shorter cached prefix does not count
    balance_abs_threshold: float = 64  # requests
    balance_rel_threshold: float = 1.5


class CacheAware:
    def __init__(self, rng: Random, thresholds: CacheAwareThresholds = CacheAwareThresholds()) -> None:
        self._rng = rng
        self._thresholds = thresholds

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        limits, loads = self._thresholds, [float(m.running) for m in members]
        costs = cost_table(members, loads) if ask.explain else None
        if is_unbalanced(loads, limits.balance_abs_threshold, limits.balance_rel_threshold):
            return Choice(members[lowest(loads, self._rng)], "least load: the fleet is unbalanced", costs)
        most = max((cached.get(m.instance_id, 0) for m in members), default=0) if cached else 0
        if most > limits.cache_threshold * ask.num_tokens:
            best = [m for m in members if cached.get(m.instance_id) == most]
            chosen = best[lowest([float(m.running) for m in best], self._rng)]
            return Choice(chosen, f"{most} of {ask.num_tokens} tokens cached", costs)
        return Choice(members[lowest(loads, self._rng)], "least load: too little is cached anywhere", costs)
