"""Policies by name: `NAME`, or `NAME@OPTION=NUMBER,…`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, Field, PositiveInt

from components.routing.affinity import BoundedHashing, SessionAffinity, prefix_only, session_or_prefix
from components.routing.cache_policies import CacheAware, CacheAwareThresholds, KvAware, KvWeights
from components.routing.policy import (
    Bucket,
    LeastLoad,
    Load,
    Policy,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    RouteRequest,
    memory_load,
    prompt_load,
)

WorkerRole = Literal["prefill", "decode"]
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
DEFAULT: Final[dict[WorkerRole, PolicyName]] = {"prefill": "kv_aware", "decode": "least_load"}
LOADS: Final[dict[WorkerRole, Load]] = {"prefill": prompt_load, "decode": memory_load}
OVERLAP: Final[dict[WorkerRole, float]] = {"prefill": 0.0, "decode": 1.0}  # of least_load

Options = Mapping[str, float]
MAX_OPTION: Final = 1e9  # of an option, to keep products finite
OPTIONS: Final[dict[PolicyName, Sequence[str]]] = {
    "least_load": ("overlap",),
    "kv_aware": ("cached", "queued", "temperature"),
    "cache_aware": tuple(f.name for f in fields(CacheAwareThresholds)),
    "prefix_hash": ("load_factor", "slack_tokens"),
    "consistent_hashing": ("load_factor", "slack_tokens"),
    "bucket": ("balance_abs_tokens", "balance_rel"),
    "session_affinity": ("idle_s",),
}
_MAKERS: Final[dict[PolicyName, Callable[[WorkerRole, Random, Options], Policy]]] = {
    "round_robin": lambda role, rng, options: RoundRobin(),
    "random": lambda role, rng, options: RandomChoice(rng),
    "power_of_two": lambda role, rng, options: PowerOfTwo(rng, LOADS[role]),
    "least_load": lambda role, rng, options: LeastLoad(rng, LOADS[role], _overlap(role, options)),
    "kv_aware": lambda role, rng, options: KvAware(rng, KvWeights(**options)),
    "cache_aware": lambda role, rng, options: CacheAware(rng, CacheAwareThresholds(**options)),
    "prefix_hash": lambda role, rng, options: BoundedHashing(rng, LOADS[role], prefix_only, "least_load", **options),
    "consistent_hashing": lambda role, rng, options: BoundedHashing(
        rng, LOADS[role], session_or_prefix, "next", **options
    ),
    "bucket": lambda role, rng, options: Bucket(rng, LOADS[role], **options),
    "session_affinity": lambda role, rng, options: SessionAffinity(
        _default(role).make(role, rng), LOADS[role], **options
    ),
}


@dataclass(frozen=True, slots=True)
class PolicySpec:
    text: str
    name: PolicyName
    options: Options

    def make(self, role: WorkerRole, rng: Random) -> Policy:
        return _MAKERS[self.name](role, rng, self.options)

    def uses_caches(self, role: WorkerRole) -> bool:
        if self.name == "session_affinity":
            return _default(role).uses_caches(role)
        return self.name in {"kv_aware", "cache_aware"} or (
            self.name == "least_load" and _overlap(role, self.options) > 0
        )

    def meeting_key(self, role: WorkerRole, request: RouteRequest) -> bytes | None:
        """The key that determines the queried candidates in a large fleet.

        None: the hashes of the prompt's prefixes. Empty: a random key.
        """
        if self.name == "session_affinity" and request.session:
            return session_or_prefix(request)
        if self.uses_caches(role):
            return None
        if self.name == "prefix_hash":
            return prefix_only(request)
        return session_or_prefix(request) if self.name == "consistent_hashing" else b""


def parse_policy(text: str) -> PolicySpec:
    """Raises: ValueError, for an unknown name or option, or a number out of range."""
    name, _, rest = text.partition("@")
    known = next((policy for policy in POLICIES if policy == name), None)
    if known is None:
        raise ValueError(f"{name!r} is not one of {', '.join(POLICIES)}")
    options: dict[str, float] = {}
    allowed = OPTIONS.get(known, ())
    for given in rest.split(",") if rest else ():
        option, _, number = given.partition("=")
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}: it has {', '.join(allowed) or 'none'}")
        try:
            options[option] = float(number)
        except ValueError:
            raise ValueError(f"{name}@{given}: write OPTION=NUMBER") from None
        if not 0 <= options[option] <= MAX_OPTION:
            raise ValueError(f"{name}@{given}: the number must be from 0 to {MAX_OPTION:g}")
    spec = PolicySpec(text, known, options)
    spec.make("prefill", Random())  # raises for numbers that would exclude all instances
    return spec


def _default(role: WorkerRole) -> PolicySpec:
    name = DEFAULT[role]
    return PolicySpec(name, name, {})


def _overlap(role: WorkerRole, options: Options) -> float:
    return options.get("overlap", OVERLAP[role])


def _checked(policy: str) -> str:
    parse_policy(policy)
    return policy


RoutingPolicy = Annotated[str, AfterValidator(_checked)]
ABOUT_POLICIES: Final = f"{', '.join(POLICIES)}; NAME@OPTION=NUMBER,… changes its numbers; docs/routing.md"

KvIndexBlocks = Annotated[
    PositiveInt,
    Field(description="cached blocks of all workers that this process remembers, about 110 bytes each"),
]
