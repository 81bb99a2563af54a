"""Load of an instance in tokens, for each phase."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from components.routing.choice import Member

REQUEST_TOKENS: Final = 64  # fixed cost of a request: a place in every step, a transfer
NO_ROOM: Final = 10  # cost factor of a token without a free page

Load = Callable[[Member, int], float]  # (instance, prompt tokens) → its load with the prompt, in tokens


def prompt_load(member: Member, tokens: int) -> float:
    return member.queued_tokens + REQUEST_TOKENS * member.running + tokens


def memory_load(member: Member, tokens: int) -> float:
    """Tokens in memory, which each decode step reads. Tokens without room count tenfold."""
    held = member.used_pages * member.page_size + tokens
    over = held - member.total_pages * member.page_size if member.total_pages else 0
    return held + member.queued_tokens + REQUEST_TOKENS * member.running + (NO_ROOM * over if over > 0 else 0)


def lowest(costs: Sequence[float], rng: Random) -> int:
    """Index of the smallest of `costs`; ties are broken at random, so that routers differ."""
    least = min(costs)
    at = costs.index(least)
    if (equal := costs.count(least)) > 1:
        for _ in range(int(rng.random() * equal)):
            at = costs.index(least, at + 1)
    return at


def cost_table(members: Sequence[Member], costs: Sequence[float]) -> Mapping[str, float]:
    return {m.instance_id: cost for m, cost in zip(members, costs, strict=True)}


def is_unbalanced(loads: Sequence[float], absolute: float, relative: float) -> bool:
    """Whether the largest load exceeds the smallest one by both thresholds.

    Source: the rule of the SGLang router's `cache_aware`, there on running requests with 64 and 1.5.
    """
    most, least = max(loads), min(loads)
    return most - least > absolute and most > relative * least
