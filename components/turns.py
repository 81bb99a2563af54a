"""Whose turn it is among those who wait, for room at the frontend and for a step in an engine: by arrival, but for two things.

A step of priority is worth so many arrivals, as lower goes first; and a long prompt lets later ones pass that are shorter.
Nobody starves: a request waits behind at most `OVERTAKERS` later arrivals for each step of priority that they are better, and
one for each `OVERTAKEN_TOKENS` that it is longer, but fewer than for a step.
"""

from typing import Final

OVERTAKERS: Final = 256
OVERTAKEN_TOKENS: Final = 256


def turn(arrival: int, priority: int, num_tokens: int) -> tuple[int, int]:
    """The least goes first. No two of one line are equal."""
    length = min(num_tokens // OVERTAKEN_TOKENS, OVERTAKERS - 1)
    return arrival + priority * OVERTAKERS + length, arrival
