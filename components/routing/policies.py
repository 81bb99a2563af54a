"""Policies by name: `NAME`, or `NAME@OPTION=NUMBER,…`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from random import Random
from typing import Final, Literal, get_args

from components.routing.affinity import SessionAffinity
from components.routing.bucket import Bucket
from components.routing.cache_aware import CacheAware, CacheAwareThresholds
from components.routing.choice import Ask, Policy
from components.routing.hashing import BoundedHashing, prefix_only, session_or_prefix
from components.routing.kv_aware import KvAware, KvWeights
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

Options = Mapping[str, float]
MOST: Final = 1e9  # of any option, to keep products finite
OPTIONS: Final[dict[PolicyName, Sequence[str]]] = {  # of policies that have any
    "least_load": ("overlap",),
    "kv_aware": tuple(f.name for f in fields(KvWeights)),
    "cache_aware": tuple(f.name for f in fields(CacheAwareThresholds)),
    "prefix_hash": ("load_factor", "slack_tokens"),
    "consistent_hashing": ("load_factor", "slack_tokens"),
    "bucket": ("balance_abs_tokens", "balance_rel"),
    "session_affinity": ("idle_s", "sessions", "spill", "spill_tokens"),
}
_MAKERS: Final[dict[PolicyName, Callable[[Phase, Random, Options], Policy]]] = {
    "round_robin": lambda phase, rng, options: RoundRobin(),
    "random": lambda phase, rng, options: RandomChoice(rng),
    "power_of_two": lambda phase, rng, options: PowerOfTwo(rng, LOADS[phase]),
    "least_load": lambda phase, rng, options: LeastLoad(rng, LOADS[phase], _overlap(phase, options)),
    "kv_aware": lambda phase, rng, options: KvAware(rng, KvWeights(**options)),
    "cache_aware": lambda phase, rng, options: CacheAware(rng, CacheAwareThresholds(**options)),
    "prefix_hash": lambda phase, rng, options: BoundedHashing(rng, LOADS[phase], prefix_only, "least_load", **options),
    "consistent_hashing": lambda phase, rng, options: BoundedHashing(
        rng, LOADS[phase], session_or_prefix, "next", **options
    ),
    "bucket": lambda phase, rng, options: Bucket(rng, LOADS[phase], **options),
    "session_affinity": lambda phase, rng, options: SessionAffinity(
        make_policy(DEFAULT[phase], phase, rng), LOADS[phase], **options
    ),
}


def parse_policy(text: str) -> tuple[PolicyName, Options]:
    """Parse `NAME` or `NAME@OPTION=NUMBER,…`. Raises: ValueError, listing the names and options."""
    name, _, rest = text.partition("@")
    known = next((policy for policy in POLICIES if policy == name), None)
    if known is None:
        raise ValueError(f"{name!r} is none of {', '.join(POLICIES)}")
    options: dict[str, float] = {}
    allowed = OPTIONS.get(known, ())
    for given in rest.split(",") if rest else ():
        option, _, number = given.partition("=")
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}: it has {', '.join(allowed) or 'none'}")
        try:
            options[option] = float(number)
        except ValueError:
            raise ValueError(f"{name}@{given}: OPTION=NUMBER is wanted") from None
        if not 0 <= options[option] <= MOST:
            raise ValueError(f"{name}@{given}: a number from 0 to {MOST:g} is wanted")
    return known, options


def check_policy(text: str) -> str:
    """The text, if it names a policy. Raises: ValueError."""
    make_policy(text, "prefill", Random())
    return text


def make_policy(text: str, phase: Phase, rng: Random) -> Policy:
    """A policy with the phase's defaults; random numbers come from `rng`.

    Raises: ValueError, also for numbers that would exclude every instance.
    """
    name, options = parse_policy(text)
    return _MAKERS[name](phase, rng, options)


def looks_at_caches(text: str, phase: Phase) -> bool:
    """Whether the policy uses cached prefixes; otherwise events are not followed."""
    name, options = parse_policy(text)
    if name == "session_affinity":
        return looks_at_caches(DEFAULT[phase], phase)
    return name in {"kv_aware", "cache_aware"} or (name == "least_load" and _overlap(phase, options) > 0)


def meeting_key(text: str, phase: Phase, ask: Ask) -> bytes | None:
    """In a fleet too large to follow, the key whose candidates are asked.

    None: the hashes of the prompt's prefixes. Empty: any instance will do, so the key is random.
    """
    name, _ = parse_policy(text)
    if name == "session_affinity" and ask.session:
        return session_or_prefix(ask)
    if looks_at_caches(text, phase):
        return None
    if name == "prefix_hash":
        return prefix_only(ask)
    return session_or_prefix(ask) if name == "consistent_hashing" else b""


def _overlap(phase: Phase, options: Options) -> float:
    return options.get("overlap", OVERLAP[phase])
