"""The interface of routing policies, and the loads that they and decode compare. No I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol

REQUEST_TOKENS: Final = 64  # fixed cost of a request, such as its transfer
NO_ROOM: Final = 10  # cost factor of a token without a free page
SMOOTHING: Final = 0.2  # weight of the latest step in a speed of prompts
MARGIN_S: Final = 0.5  # interval between heartbeats


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


@dataclass(frozen=True, slots=True)
class PromptLoad:
    queued_tokens: int
    tokens_per_s: float  # of prompts; 0: unknown
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
        self.tokens_per_s += SMOOTHING * (now - self.tokens_per_s) if self.tokens_per_s else now


def sooner_here(tokens: int, here: PromptLoad, there: Iterable[PromptLoad]) -> bool:
    """Whether `tokens` end here before any worker `there` begins them. False if no speed is known."""
    others = list(there)
    speeds = [load.tokens_per_s for load in (here, *others) if load.tokens_per_s]
    if not others or not speeds:
        return False
    usual = max(speeds)
    return min(load.seconds_for(0, usual) for load in others) > here.seconds_for(tokens, usual) + MARGIN_S
