"""Deadlines as they travel: wall-clock milliseconds, because a monotonic time means nothing in another process."""

import time

from components.errors import DeadlineExceeded


def now_ms() -> int:
    """Wall clock, Unix milliseconds."""
    return time.time_ns() // 1_000_000


def remaining_s(deadline_unix_ms: int) -> float:
    """Seconds left. Raises: DeadlineExceeded, when there are none."""
    left_s = deadline_unix_ms / 1000 - time.time()
    if left_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {-left_s:.1f} s ago")
    return left_s
