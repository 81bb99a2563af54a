"""The policies by the names that settings know them by."""

from collections.abc import Callable
from random import Random
from typing import Final, Literal, get_args

from components.routing.affinity import SessionAffinity
from components.routing.bucket import Bucket
from components.routing.cache_aware import CacheAware
from components.routing.choice import Policy
from components.routing.hashing import BoundedHashing, prefix_only, session_or_prefix
from components.routing.kv_aware import KvAware
from components.routing.load import Load, memory_load, prompt_load
from components.routing.policy import LeastLoad, PowerOfTwo, RandomChoice, RoundRobin

Phase = Literal["prefill", "decode"]
PolicyName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_load",
    "kv_aware",
    "cache_aware",
    "prefix_hash",
    "consistent_hashing",
    "bucket",
    "session_affinity",
]
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)
DEFAULT: Final[dict[Phase, PolicyName]] = {"prefill": "kv_aware", "decode": "least_load"}
LOADS: Final[dict[Phase, Load]] = {"prefill": prompt_load, "decode": memory_load}
OVERLAP: Final[dict[Phase, float]] = {"prefill": 0.0, "decode": 1.0}  # of least_load

_MAKERS: Final[dict[PolicyName, Callable[[Phase, Random], Policy]]] = {
    "round_robin": lambda phase, rng: RoundRobin(),
    "random": lambda phase, rng: RandomChoice(rng),
    "power_of_two": lambda phase, rng: PowerOfTwo(rng, LOADS[phase]),
    "least_load": lambda phase, rng: LeastLoad(rng, LOADS[phase], OVERLAP[phase]),
    "kv_aware": lambda phase, rng: KvAware(rng),
    "cache_aware": lambda phase, rng: CacheAware(rng),
    "prefix_hash": lambda phase, rng: BoundedHashing(rng, LOADS[phase], prefix_only, "least_load"),
    "consistent_hashing": lambda phase, rng: BoundedHashing(rng, LOADS[phase], session_or_prefix, "next"),
    "bucket": lambda phase, rng: Bucket(rng, LOADS[phase]),
    "session_affinity": lambda phase, rng: SessionAffinity(make_policy(DEFAULT[phase], phase, rng), LOADS[phase]),
}


def make_policy(name: PolicyName, phase: Phase, rng: Random) -> Policy:
    """A policy with its defaults for that phase; its draws come from `rng` alone."""
    return _MAKERS[name](phase, rng)


def looks_at_caches(name: PolicyName, phase: Phase) -> bool:
    """Whether it matters to a policy what instances have cached; else nobody need follow their events."""
    if name == "session_affinity":
        name = DEFAULT[phase]
    return name in {"kv_aware", "cache_aware"} or (name == "least_load" and OVERLAP[phase] > 0)
