"""Policies that compare cached prefixes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median_low
from typing import Final

from components.routing.policy import (
    REQUEST_TOKENS,
    Cached,
    Member,
    PolicyChoice,
    RouteRequest,
    cost_table,
    is_unbalanced,
    lowest,
)

SPEED_RANGE: Final = 4.0  # a speed counts as within this factor of the median
USUAL_SPEEDS: Final = 2.0  # a speed within this factor counts as the median
GIVEN_HALF_LIFE_S: Final = 60.0
REBASE_AFTER_HALF_LIVES: Final = 64.0  # then values are rebased, against overflow


@dataclass(frozen=True, slots=True)
class KvWeights:
    cached: float = 1.0
    queued: float = 0.5  # shorter prompts overtake, so about half of the tokens go first
    crowd_tokens: float = 16384.0  # mean queue at which an uncached token, which delays all behind it, counts twice
    request: float = REQUEST_TOKENS
    temperature: float = 0.0  # in prompts: a cost higher by this is e times less likely; 0: always the best
    near: float = 0.05  # in prompts: costs so close to the smallest are equal
    spill: float = 2.0  # times the mean, plus `spill_*`: above it an instance is excluded
    spill_requests: float = 4
    spill_tokens: float = 8192


class _Given:
    """Tokens that this router gave to each instance, with exponential decay.

    Old values do not decay: new ones grow. Source: forward decay, Cormode et al. 2009.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._tokens: dict[str, float] = {}

    def least(self, members: Sequence[Member], near: Sequence[int], rng: Random) -> int:
        given = [self._tokens.get(members[at].instance_id, 0.0) for at in near]
        return near[lowest(given, rng)]

    def add(self, instance_id: str, tokens: float, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        age = (now_s - self._since_s) / GIVEN_HALF_LIFE_S
        if age > REBASE_AFTER_HALF_LIVES:
            by = 2.0**-age if age < 1000 else 0.0
            self._tokens = {name: had * by for name, had in self._tokens.items() if had * by >= 1}
            self._since_s, age = now_s, 0.0
        self._tokens[instance_id] = self._tokens.get(instance_id, 0.0) + tokens * 2.0**age


class KvAware:
    """Minimise queued plus uncached tokens, per device of an instance.

    Reports are late, and routers do not see each other's requests, so a router spreads its own evenly among nearly equal costs.
    With a spill of at least 2 some instance remains, because fewer than half exceed twice the mean.
    """

    def __init__(self, rng: Random, weights: KvWeights = KvWeights()) -> None:
        self._rng = rng
        self._weights = weights
        self._given = _Given()

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        running: list[float] = [m.running for m in members]
        queued: list[float] = [m.queued_tokens for m in members]
        speeds = [m.prompt_tokens_per_s for m in members]
        costs = self._costs(request, members, running, queued, cached)
        devices = [m.devices for m in members]
        if max(devices) > 1:
            running, queued, speeds, costs = (_by_device(one, devices) for one in (running, queued, speeds, costs))
        costs = _by_speed(costs, speeds)
        spilled = self._exclude_crowded(running, queued, costs)
        weights = self._weights
        if weights.temperature:
            least, scale = min(costs), weights.temperature * max(request.num_tokens, 1)
            at = self._rng.choices(range(len(costs)), [math.exp((least - cost) / scale) for cost in costs])[0]
        else:
            limit = min(costs) + weights.near * request.num_tokens
            near = [at for at, cost in enumerate(costs) if cost <= limit]
            at = near[0] if len(near) == 1 else self._given.least(members, near, self._rng)
        chosen = members[at]
        if not request.dry:
            to_compute = max(request.num_tokens - cached.get(chosen.instance_id, 0), 0)
            self._given.add(chosen.instance_id, to_compute, now_s)
        why = (
            f"{cached.get(chosen.instance_id, 0)} of {request.num_tokens} tokens cached, {chosen.queued_tokens} queued, "
            f"cost {costs[at]:.0f}" + (f", {spilled} too full" if spilled else "")
        )
        return PolicyChoice(chosen, why, cost_table(members, costs) if request.explain else None)

    def _costs(
        self,
        request: RouteRequest,
        members: Sequence[Member],
        running: Sequence[float],
        queued: Sequence[float],
        cached: Cached,
    ) -> list[float]:
        weights, tokens = self._weights, request.num_tokens
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
        return costs

    def _exclude_crowded(self, running: Sequence[float], queued: Sequence[float], costs: list[float]) -> int:
        """Set excluded members' cost to infinity. Returns: their number."""
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


def _by_device(values: Sequence[float], devices: Sequence[int]) -> list[float]:
    return [value / count for value, count in zip(values, devices, strict=True)]


def _by_speed(costs: list[float], speeds: Sequence[float]) -> list[float]:
    """Scale costs by speed, relative to the usual."""
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return costs
    usual = median_low(known)
    fast, slow = usual * USUAL_SPEEDS, usual / USUAL_SPEEDS
    if min(known) >= slow and max(known) <= fast:
        return costs
    return [
        cost if speed <= 0 or slow <= speed <= fast else cost / min(max(speed / usual, 1 / SPEED_RANGE), SPEED_RANGE)
        for cost, speed in zip(costs, speeds, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class CacheAwareThresholds:
    cache_threshold: float = 0.3  # of the prompt
    balance_abs_threshold: float = 64  # requests
    balance_rel_threshold: float = 1.5


class CacheAware:
    """The SGLang router's rule: the longest cached prefix or, if loads are unbalanced, the least load."""

    def __init__(self, rng: Random, thresholds: CacheAwareThresholds = CacheAwareThresholds()) -> None:
        self._rng = rng
        self._thresholds = thresholds

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        limits, loads = self._thresholds, [m.running / m.devices for m in members]
        costs = cost_table(members, loads) if request.explain else None
        if is_unbalanced(loads, limits.balance_abs_threshold, limits.balance_rel_threshold):
            return PolicyChoice(members[lowest(loads, self._rng)], "least load: the fleet is unbalanced", costs)
        most = max((cached.get(m.instance_id, 0) for m in members), default=0) if cached else 0
        if most > limits.cache_threshold * request.num_tokens:
            best = [m for m in members if cached.get(m.instance_id) == most]
            chosen = best[lowest([m.running / m.devices for m in best], self._rng)]
            return PolicyChoice(chosen, f"{most} of {request.num_tokens} tokens cached", costs)
        return PolicyChoice(members[lowest(loads, self._rng)], "least load: no long cached prefix", costs)
