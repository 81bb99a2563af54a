"""What an instance carries, in tokens, for each phase; and what policies do with such numbers."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from components.routing.choice import Member

REQUEST_TOKENS: Final = 64  # what a request costs beside its tokens: a place in every step, a transfer
NO_ROOM: Final = 10  # a token that finds no page waits for others to end

Load = Callable[[Member, int], float]  # (instance, tokens of the prompt) → what it would carry with it, in tokens


def prompt_load(member: Member, tokens: int) -> float:
    """Prompt tokens to compute, of an instance that computes prompts."""
    return member.queued_tokens + REQUEST_TOKENS * member.running + tokens


def memory_load(member: Member, tokens: int) -> float:
    """Tokens in memory, of an instance that decodes: they are what a step reads. What has no room counts tenfold."""
    held = member.used_pages * member.page_size + tokens
    over = held - member.total_pages * member.page_size if member.total_pages else 0
    return held + member.queued_tokens + REQUEST_TOKENS * member.running + (NO_ROOM * over if over > 0 else 0)


def lowest(costs: Sequence[float], rng: Random) -> int:
    """Index of the smallest of `costs`; of equal ones, one that is drawn, so that routers do not all agree on the first."""
    least = min(costs)
    at = costs.index(least)
    if (equal := costs.count(least)) > 1:
        for _ in range(int(rng.random() * equal)):
            at = costs.index(least, at + 1)
    return at


def cost_table(members: Sequence[Member], costs: Sequence[float]) -> Mapping[str, float]:
    """`costs` by instance id."""
    return {m.instance_id: cost for m, cost in zip(members, costs, strict=True)}


def is_unbalanced(loads: Sequence[float], absolute: float, relative: float) -> bool:
    """Whether the greatest load is above the smallest one by both thresholds.

    Source: the rule of the SGLang router's `cache_aware`, there on running requests with 64 and 1.5.
    """
    most, least = max(loads), min(loads)
    return most - least > absolute and most > relative * least
