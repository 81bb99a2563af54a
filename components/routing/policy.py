"""Routing policies: their interface, the loads that they compare, and those that compare only loads. No I/O.

docs/routing.md has the formulas, and says which policy to use when.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple, Protocol

REQUEST_TOKENS: Final = 64  # fixed cost of a request, such as its transfer
NO_ROOM_COST_FACTOR: Final = 10  # for a token without a free page
LATEST_SPEED_WEIGHT: Final = 0.2  # in the prefill speed
MARGIN_S: Final = 0.5  # interval between heartbeats
BY_ID: Final = attrgetter("instance_id")  # the order of sorted members


class HasInstanceId(Protocol):
    @property
    def instance_id(self) -> str:
        pass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    num_tokens: int  # of the prompt, plus generated ones after a move
    session: str = ""
    prefix: bytes = b""  # hash of its first tokens
    explain: bool = False  # also report costs, which takes time
    dry: bool = False  # changes no state


@dataclass(slots=True)
class Member:
    """An instance as policies see it. Updated in place, without allocation."""

    instance_id: str
    queued_tokens: int = 0  # of prompts, still to compute
    running: int = 0  # branches, also those being sent
    used_pages: int = 0  # neither free nor merely cached
    total_pages: int = 0
    prompt_tokens_per_s: float = 0.0  # prefill speed; 0: unknown
    page_size: int = 16  # tokens
    devices: int = 1  # loads are compared per device


Cached = Mapping[str, int]  # tokens of a prompt by instance id, without zeros


class PolicyChoice(NamedTuple):
    member: Member
    why: str  # for spans and `inspect route`
    costs: Mapping[str, float] | None = None  # by instance id, in the policy's unit


class Policy(Protocol):
    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        """Choose one of `members`.

        Args:
            members: at least one, sorted by instance id.
            cached: cached tokens of the prompt by instance id, without zeros.
            now_s: monotonic.
        """


Load = Callable[[Member, int], float]  # (instance, prompt tokens) → load in tokens per device


def prompt_load(member: Member, tokens: int) -> float:
    return (member.queued_tokens + REQUEST_TOKENS * member.running + tokens) / member.devices


def memory_load(member: Member, tokens: int) -> float:
    held = member.used_pages * member.page_size + tokens
    over = held - member.total_pages * member.page_size if member.total_pages else 0
    load = (
        held + member.queued_tokens + REQUEST_TOKENS * member.running + (NO_ROOM_COST_FACTOR * over if over > 0 else 0)
    )
    return load / member.devices


def lowest(costs: Sequence[float], rng: Random) -> int:
    """Index of the smallest cost. Ties are broken at random, so that routers choose differently."""
    least = min(costs)
    at = costs.index(least)
    if (equal := costs.count(least)) > 1:
        for _ in range(int(rng.random() * equal)):
            at = costs.index(least, at + 1)
    return at


def cost_table(members: Sequence[Member], costs: Sequence[float]) -> Mapping[str, float]:
    return {m.instance_id: cost for m, cost in zip(members, costs, strict=True)}


def is_unbalanced(loads: Sequence[float], absolute: float, relative: float) -> bool:
    """Source: the SGLang router's `cache_aware`."""
    most, least = max(loads), min(loads)
    return most - least > absolute and most > relative * least


@dataclass(frozen=True, slots=True)
class PromptLoad:
    queued_tokens: int
    tokens_per_s: float  # prefill speed; 0: unknown
    age_s: float = 0.0  # of the report

    def seconds_for(self, tokens: int, usual: float) -> float:
        return max(0.0, (self.queued_tokens + tokens) / (self.tokens_per_s or usual) - self.age_s)


class PromptRate:
    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def stepped(self, prompt_tokens: int, step_s: float) -> None:
        if not prompt_tokens or step_s <= 0:
            return
        now = prompt_tokens / step_s
        self.tokens_per_s += LATEST_SPEED_WEIGHT * (now - self.tokens_per_s) if self.tokens_per_s else now


def is_sooner_locally(tokens: int, here: PromptLoad, there: Iterable[PromptLoad]) -> bool:
    """Return whether `tokens` would be finished here before any worker `there` starts them. False if speeds are unknown."""
    others = list(there)
    speeds = [load.tokens_per_s for load in (here, *others) if load.tokens_per_s]
    if not others or not speeds:
        return False
    usual = max(speeds)
    return min(load.seconds_for(0, usual) for load in others) > here.seconds_for(tokens, usual) + MARGIN_S


class RoundRobin:
    def __init__(self) -> None:
        self._last = ""  # an index would make turns unfair when the fleet changes

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        at = bisect_right(members, self._last, key=BY_ID)
        chosen = members[at] if at < len(members) else members[0]
        if not request.dry:
            self._last = chosen.instance_id
        return PolicyChoice(chosen, "its turn")


class RandomChoice:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        return PolicyChoice(self._rng.choice(members), "drawn")


class PowerOfTwo:
    """Choose the less loaded of two random instances, so that routers with equal stale reports differ.

    Source: Mitzenmacher 2001, "The power of two choices in randomized load balancing".
    """

    def __init__(self, rng: Random, load: Load) -> None:
        self._rng = rng
        self._load = load

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        if len(members) < 2:
            return PolicyChoice(members[0], "the only one")
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

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        load, tokens, overlap = self._load, request.num_tokens, self._overlap
        if overlap and cached:
            costs = [load(m, tokens) - overlap * min(cached.get(m.instance_id, 0), tokens) / m.devices for m in members]
        else:
            costs = [load(m, tokens) for m in members]
        at = lowest(costs, self._rng)
        why = f"cost {costs[at]:.0f}, {cached.get(members[at].instance_id, 0)} of {tokens} tokens cached"
        return PolicyChoice(members[at], why, cost_table(members, costs) if request.explain else None)


BUCKET_HISTORY_PROMPTS: Final = 1024
LEARN_INTERVAL_PROMPTS: Final = 64
BALANCE_ABS_TOKENS: Final = 16384
BALANCE_REL: Final = 1.5


class Bucket:
    """Each instance serves a range of prompt lengths, so that short prompts do not wait for long ones.

    Without a history, or with unbalanced loads, the least loaded instance is chosen.
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
        self._lengths: deque[int] = deque(maxlen=BUCKET_HISTORY_PROMPTS)
        self._learned = 0  # prompts since `_sorted`
        self._sorted: list[int] = []
        self._below: list[int] = [0]  # tokens in the first i of `_sorted`

    def choose(self, request: RouteRequest, members: Sequence[Member], cached: Cached, now_s: float) -> PolicyChoice:
        if not request.dry:
            self._learn(max(request.num_tokens, 1))
        loads = [self._load(m, 0) for m in members]
        if not self._sorted or is_unbalanced(loads, self._absolute, self._relative):
            why = "least load: " + ("the fleet is unbalanced" if self._sorted else "too few prompts so far")
            return PolicyChoice(members[lowest(loads, self._rng)], why)
        share = self._share(request.num_tokens)
        chosen = members[min(int(share * len(members)), len(members) - 1)]
        return PolicyChoice(chosen, f"{share:.0%} of all tokens are in shorter prompts")

    def _learn(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._learned += 1
        if self._learned >= LEARN_INTERVAL_PROMPTS:
            self._learned = 0
            self._sorted = sorted(self._lengths)
            self._below = [0, *accumulate(self._sorted)]

    def _share(self, tokens: int) -> float:
        shorter = self._below[bisect_left(self._sorted, tokens)]
        not_longer = self._below[bisect_right(self._sorted, tokens)]
        return (shorter + self._rng.random() * (not_longer - shorter)) / self._below[-1]
