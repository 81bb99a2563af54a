"""The instance that has the least to compute until this prompt is done: what it has queued, and what it has not cached."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median_low
from typing import Final

from components.routing.choice import Ask, Choice, Member
from components.routing.load import REQUEST_TOKENS, cost_table, lowest

SPEED_RANGE: Final = (
    4.0  # a worker counts as at most this many times as fast or slow as the usual one, whatever it says
)


@dataclass(frozen=True, slots=True)
class KvWeights:
    """What makes the cost. The defaults reckon in prompt tokens to compute."""

    cached: float = 1.0  # saved by each cached token of the prompt; less: spread more
    queued: float = 1.0  # for each prompt token queued there
    request: float = REQUEST_TOKENS  # for each request there
    temperature: float = 0.0  # in prompts: how much more cost makes a choice e times less likely; 0: never chosen
    spill: float = 2.0  # an instance with more than this multiple of the mean, and the slack, is passed over
    spill_requests: int = 4  # the slack, in requests
    spill_tokens: int = 8192  # the slack, in queued tokens

    def __post_init__(self) -> None:
        if self.spill < 2:
            raise ValueError(f"spill is {self.spill}; below 2 nobody might be left to choose")
        if min(self.cached, self.queued, self.request, self.temperature, self.spill_requests, self.spill_tokens) < 0:
            raise ValueError("weights must not be negative")


class KvAware:
    """Smallest expected work, in tokens: `(queued + request * running + prompt - cached) * usual speed / its speed`.

    Nobody who carries more than `spill` times the mean of requests or of queued tokens, and a slack, is asked, however
    much is cached there: fewer than half can be above twice a mean, so for two means somebody is always left.
    """

    def __init__(self, rng: Random, weights: KvWeights = KvWeights()) -> None:
        self._rng = rng
        self._weights = weights

    def choose(self, ask: Ask, members: Sequence[Member], cached: Mapping[str, int], now_s: float) -> Choice | None:
        """See `choice.Policy`."""
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
            at = lowest(costs, self._rng)
        chosen = members[at]
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
        """Without a call for each member: a fleet may have a thousand."""
        each, a_request, tokens = self._weights.queued, self._weights.request, ask.num_tokens
        costs = [each * q + a_request * r + tokens for q, r in zip(queued, running, strict=True)]
        if cached:
            saved = self._weights.cached
            hits = [cached.get(m.instance_id) for m in members]
            for at, hit in enumerate(hits):
                if hit:
                    costs[at] -= min(saved * hit, tokens)
        speeds = [m.prompt_tokens_per_s for m in members]
        known = [speed for speed in speeds if speed > 0]
        if not known:
            return costs
        usual = median_low(known)
        fast, slow = usual * SPEED_RANGE, usual / SPEED_RANGE
        if min(known) < slow or max(known) > fast:
            speeds = [min(max(speed, slow), fast) if speed > 0 else 0.0 for speed in speeds]
        return [cost * usual / speed if speed else cost for cost, speed in zip(costs, speeds, strict=True)]

    def _pass_over_crowded(self, running: Sequence[int], queued: Sequence[int], costs: list[float]) -> int:
        """How many are too full; their cost becomes infinite."""
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
