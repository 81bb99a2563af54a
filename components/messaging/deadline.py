"""Deadlines on the wire in wall-clock milliseconds: monotonic times differ between processes."""

import time

from components.errors import DeadlineExceeded


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def remaining_s(deadline_unix_ms: int) -> float:
    left_s = deadline_unix_ms / 1000 - time.time()
    if left_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {-left_s:.1f} s ago")
    return left_s
