"""Choose the instance with the least work until this prompt is computed: its queue plus the uncached tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median_low
from typing import Final

from components.routing.choice import Ask, Choice, Member
from components.routing.load import REQUEST_TOKENS, cost_table, lowest

SPEED_RANGE: Final = 4.0  # limit of how much faster or slower than usual a worker may claim to be
REBASE: Final = 64.0  # half-lives until values are rebased, long before floats overflow


@dataclass(frozen=True, slots=True)
class KvWeights:
    cached: float = 1.0  # per cached token of the prompt; lower: spread more
    # per queued prompt token: an engine lets shorter prompts overtake, so half of them go first
    queued: float = 0.5
    # mean queue in tokens for which uncached tokens count twice: they delay all that wait behind them
    crowd_tokens: float = 16384.0
    request: float = REQUEST_TOKENS  # per request there
    temperature: float = 0.0  # in prompts: cost that makes a choice e times less likely; 0: always the best
    near: float = 0.05  # in prompts: costs this close to the smallest one are equal
    even_s: float = 60.0  # half-life of work given to an instance; of equals, the one with the least is chosen
    usual_speeds: float = 2.0  # speeds within this factor of the usual one are equal: a step's time is no more precise
    spill: float = 2.0  # an instance above this multiple of the mean, and the slack, is excluded
    spill_requests: float = 4  # slack in requests
    spill_tokens: float = 8192  # slack in queued tokens

    def __post_init__(self) -> None:
        if self.spill < 2:
            raise ValueError(f"spill is {self.spill}; below 2 nobody might be left to choose")
        if self.even_s < 1e-3 or self.crowd_tokens < 1 or self.usual_speeds < 1:
            raise ValueError("even_s must be 0.001 at least, crowd_tokens and usual_speeds 1")
        if min(self.cached, self.queued, self.request, self.temperature, self.near) < 0:
            raise ValueError("weights must not be negative")
        if min(self.spill_requests, self.spill_tokens) < 0:
            raise ValueError("slacks must not be negative")


class _Given:
    """Recent tokens given to each instance, with exponential decay.

    Instead of decaying old values, new ones grow; they are only compared. Source: forward decay, Cormode et al.
    2009.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._since_s: float | None = None
        self._tokens: dict[str, float] = {}

    def least(self, members: Sequence[Member], near: Sequence[int], rng: Random) -> int:
        """Of the indices `near`, the member that was given the least; ties are broken at random."""
        given = [self._tokens.get(members[at].instance_id, 0.0) for at in near]
        return near[lowest(given, rng)]

    def add(self, instance_id: str, tokens: float, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        age = (now_s - self._since_s) / self._half_life_s
        if age > REBASE:
            by = 2.0**-age if age < 1000 else 0.0
            self._tokens = {name: had * by for name, had in self._tokens.items() if had * by >= 1}
            self._since_s, age = now_s, 0.0
        self._tokens[instance_id] = self._tokens.get(instance_id, 0.0) + tokens * 2.0**age


class KvAware:
    """Smallest `(queued / 2 + request * running + c * (prompt - cached)) * usual speed / its speed`, in tokens.

    c = 1 + mean queue / `crowd_tokens` if anything is cached: the longer all queues, the more a cache is worth, or
    a fleet near its limit would compute the same prompts again and again.

    Routers do not know each other's requests, and reports are late. So speeds within `usual_speeds` and costs
    within `near` are equal, and each router chooses among equals the one that it has given least. So new
    conversations spread evenly, and routers do not all choose the same instance.

    An instance above `spill` times the mean of requests or queued tokens, and the slack, is excluded. Fewer than
    half can exceed twice a mean, so with two means an instance is always left.
    """

    def __init__(self, rng: Random, weights: KvWeights = KvWeights()) -> None:
        self._rng = rng
        self._weights = weights
        self._given = _Given(weights.even_s)

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        if not members:
            return None
        running = [m.running for m in members]
        queued = [m.queued_tokens for m in members]
        costs = self._costs(ask, members, running, queued, cached)
        spilled = self._pass_over_crowded(running, queued, costs)
        weights = self._weights
        if weights.temperature:
            least, scale = min(costs), weights.temperature * max(ask.num_tokens, 1)
            at = self._rng.choices(range(len(costs)), [math.exp((least - cost) / scale) for cost in costs])[0]
        else:
            limit = min(costs) + weights.near * ask.num_tokens
            near = [at for at, cost in enumerate(costs) if cost <= limit]
            at = near[0] if len(near) == 1 else self._given.least(members, near, self._rng)
        chosen = members[at]
        if not ask.dry:
            to_compute = max(ask.num_tokens - cached.get(chosen.instance_id, 0), 0)
            self._given.add(chosen.instance_id, to_compute, now_s)
        why = (
            f"{cached.get(chosen.instance_id, 0)} of {ask.num_tokens} tokens cached, {chosen.queued_tokens} queued, "
            f"cost {costs[at]:.0f}" + (f", {spilled} too full" if spilled else "")
        )
        return Choice(chosen, why, cost_table(members, costs) if ask.explain else None)

    def _costs(
        self,
        ask: Ask,
        members: Sequence[Member],
        running: Sequence[int],
        queued: Sequence[int],
        cached: Mapping[str, int],
    ) -> list[float]:
        """In one pass, without a call per member: a fleet may have a thousand."""
        weights, tokens = self._weights, ask.num_tokens
        each, a_request = weights.queued, weights.request
        crowd = 1 + sum(queued) / len(queued) / weights.crowd_tokens if cached else 1.0
        whole = crowd * tokens
        costs = [each * q + a_request * r + whole for q, r in zip(queued, running, strict=True)]
        if cached:
            saved = weights.cached
            hits = [cached.get(m.instance_id) for m in members]
            for at, hit in enumerate(hits):
                if hit:
                    costs[at] -= crowd * min(saved * hit, tokens)
        speeds = [m.prompt_tokens_per_s for m in members]
        known = [speed for speed in speeds if speed > 0]
        if not known:
            return costs
        usual = median_low(known)
        alike = weights.usual_speeds
        fast, slow = usual * alike, usual / alike
        if min(known) >= slow and max(known) <= fast:
            return costs
        return [
            cost
            if speed <= 0 or slow <= speed <= fast
            else cost / min(max(speed / usual, 1 / SPEED_RANGE), SPEED_RANGE)
            for cost, speed in zip(costs, speeds, strict=True)
        ]

    def _pass_over_crowded(self, running: Sequence[int], queued: Sequence[int], costs: list[float]) -> int:
        """Excluded members get an infinite cost. Returns: their number."""
        weights, count = self._weights, len(costs)
        most_running = weights.spill * sum(running) / count + weights.spill_requests
        most_queued = weights.spill * sum(queued) / count + weights.spill_tokens
        if max(running) <= most_running and max(queued) <= most_queued:
            return 0
        crowded = 0
        for at, (requests, tokens) in enumerate(zip(running, queued, strict=True)):
            if requests > most_running or tokens > most_queued:
                costs[at] = math.inf
                crowded += 1
        return crowded
