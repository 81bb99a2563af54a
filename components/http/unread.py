"""Detect a slow consumer: a client that reads an answer too slowly."""

import contextlib
import fcntl
import struct
import termios

from components.http.limits import ClientLimits


class Unread:
    """Measures how long bytes wait for a client.

    Each byte that the client takes shortens it, also while as many are added behind. The buffer's size alone would not show
    that: an answer in equal parts fills it to the same level again and again. The kernel takes bytes from this process in
    steps of 100 KB or more, so bytes that it has not delivered yet count as waiting, too.
    """

    def __init__(self, limits: ClientLimits, now_s: float) -> None:
        """`now_s` here and below: loop time."""
        self._limits = limits
        self._since_s = now_s
        self._taken = 0  # bytes, at the latest check

    def held_up(self, seconds: float) -> None:
        """Exclude time in which this process did not run."""
        self._since_s += seconds

    def is_too_long(self, now_s: float, written: int, waiting: int, *, undelivered: int = 0, is_full: bool) -> bool:
        """Return whether the client is too slow.

        Args:
            written: bytes in all.
            waiting: of those, in this process.
            undelivered: of those, in the kernel.
            is_full: the answer waits for the client; otherwise some bytes may wait.
        """
        delivered = written - waiting - undelivered
        taken, self._taken = delivered - self._taken, delivered
        if waiting and is_full:
            self._since_s = min(now_s, self._since_s + max(0, taken) / self._limits.bytes_per_s)
        else:
            self._since_s = now_s
        return now_s - self._since_s > self._limits.unread_s


def undelivered_bytes(descriptor: int) -> int:
    """Return how many bytes of a socket the peer has not acknowledged; 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: -1, of a closed socket
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        return int(count)
    return 0
