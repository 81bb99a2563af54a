"""The interface of routing policies, and the loads that they compare. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol

REQUEST_TOKENS: Final = 64  # fixed cost of a request, such as its transfer
NO_ROOM: Final = 10  # cost factor of a token without a free page


class HasInstanceId(Protocol):
    @property
    def instance_id(self) -> str:
        pass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    num_tokens: int  # of the prompt, and of output before a move
    session: str = ""
    prefix: bytes = b""  # hash of its first tokens
    explain: bool = False  # also report costs, which takes time
    dry: bool = False  # only a question, which changes no state


@dataclass(slots=True)
class Member:
    """Updated in place, without allocation."""

    instance_id: str
    queued_tokens: int = 0  # prompt tokens not computed
    running: int = 0  # branches there and on their way
    used_pages: int = 0  # neither free nor merely cached
    total_pages: int = 0
    prompt_tokens_per_s: float = 0.0  # recent; 0: unknown
    page_size: int = 16  # tokens


class PolicyChoice(NamedTuple):
    member: Member
    why: str  # for spans and `inspect route`
    costs: Mapping[str, float] | None = None  # by instance id, in the policy's unit


class Policy(Protocol):
    def choose(
        self, request: RouteRequest, members: Sequence[Member], cached: Mapping[str, int], now_s: float
    ) -> PolicyChoice | None:
        """Return one of `members`, if there are any.

        Args:
            request: the prompt to route.
            members: sorted by instance id.
            cached: tokens of the prompt by instance id, without zeros.
            now_s: monotonic.
        """


Load = Callable[[Member, int], float]  # in tokens, for an instance and prompt tokens


def prompt_load(member: Member, tokens: int) -> float:
    return member.queued_tokens + REQUEST_TOKENS * member.running + tokens


def memory_load(member: Member, tokens: int) -> float:
    held = member.used_pages * member.page_size + tokens
    over = held - member.total_pages * member.page_size if member.total_pages else 0
    return held + member.queued_tokens + REQUEST_TOKENS * member.running + (NO_ROOM * over if over > 0 else 0)


def lowest(costs: Sequence[float], rng: Random) -> int:
    """Index of the smallest cost. Ties are random, so that routers differ."""
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
