"""Queue order, shared by the frontend and the engine: by arrival, priority and prompt length.

No request starves: later arrivals overtake it at most `OVERTAKERS` times per step of priority, and once per
`OVERTAKEN_TOKENS` that its prompt is longer.
"""

from typing import Final

OVERTAKERS: Final = 256
OVERTAKEN_TOKENS: Final = 256


def turn(arrival: int, priority: int, num_tokens: int) -> tuple[int, int]:
    length = min(num_tokens // OVERTAKEN_TOKENS, OVERTAKERS - 1)
    return arrival + priority * OVERTAKERS + length, arrival
