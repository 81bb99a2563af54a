"""Clock skew of other processes, and conversion of their deadlines to our clock.

Arrival time minus sending time is skew plus delay. A peer's smallest recent difference has the shortest delay, so it corrects
the peer's deadlines. One message is not enough: it may have waited in the socket of a frozen process. So old peers are not
forgotten: after a long freeze all are old, and a delayed message would count as a first one. A delayed first message looks like
a skew, so until more arrive, the deadline of a write is not extended.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from components.errors import DeadlineExceeded
from components.wire.codec import Dated

log = logging.getLogger(__name__)

TOLERATED_MS: Final = 1000  # smaller skews are ignored, because deadlines are tens of seconds away
WINDOW_S: Final = 30.0  # a clock set back makes deadlines early for one to two windows
MAX_PEERS: Final = 4096
SHOWN_S: Final = 600.0  # since a peer's last message; the skew of a peer that left must not raise an alert
MIN_MESSAGES: Final = 3  # before a positive skew is reported, because fewer may all be late
MIN_KNOWN_S: Final = 1.0  # since the first message; messages that waited together arrive together
MAX_WAIT_MS: Final = 600_000  # longest delay of a first message by a freeze; a larger difference is a skew

D = TypeVar("D", bound=Dated)


def now_ms() -> int:
    """Wall clock, as in all deadlines on the wire: monotonic times differ between processes."""
    return time.time_ns() // 1_000_000


def remaining_s(deadline_unix_ms: int) -> float:
    left_s = deadline_unix_ms / 1000 - time.time()
    if left_s <= 0:
        raise DeadlineExceeded(f"the deadline passed {-left_s:.1f} s ago")
    return left_s


@dataclass(slots=True)
class _Peer:
    """Smallest differences in this and the previous window, in milliseconds."""

    since_s: float
    smallest: int
    before: int
    received_s: float
    first_s: float
    count: int = 0
    reported_ms: int = 0

    @property
    def skew_ms(self) -> int:
        return min(self.smallest, self.before)

    @property
    def is_known(self) -> bool:
        """Return whether a freeze cannot have delayed all its messages."""
        return self.count >= MIN_MESSAGES and self.received_s - self.first_s >= MIN_KNOWN_S


class PeerClocks(Collector):
    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], _Peer] = {}  # by role and sender

    def converted(self, message: D) -> D:  # with its deadline by our clock
        if not message.sent_unix_ms:
            return message
        sender = message.sent_by, message.sender
        skew_ms = self._measure(sender, now_ms() - message.sent_unix_ms)
        if abs(skew_ms) <= TOLERATED_MS:
            return message
        if message.fences_writes and 0 < skew_ms <= MAX_WAIT_MS and not self._peers[sender].is_known:
            return message
        return replace(message, deadline_unix_ms=message.deadline_unix_ms + skew_ms)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        since_s = time.monotonic() - SHOWN_S
        shown_ms = (abs(peer.skew_ms) for peer in self._peers.values() if peer.received_s >= since_s)
        yield GaugeMetricFamily(
            "kvmesh_clock_skew_seconds",
            "Largest difference from the clock of a process that sends messages here, including network delay.",
            value=max(shown_ms, default=0) / 1000,
        )

    def _measure(self, sender: tuple[str, str], difference_ms: int) -> int:
        now_s = time.monotonic()
        peer = self._peers.get(sender)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._forget_oldest()
            peer = self._peers[sender] = _Peer(now_s, difference_ms, difference_ms, now_s, now_s)
        elif now_s - peer.since_s > WINDOW_S:  # only at a message: a frozen process keeps its measurement
            peer.since_s, peer.before, peer.smallest = now_s, peer.smallest, difference_ms
        peer.smallest = min(peer.smallest, difference_ms)
        peer.received_s = now_s
        peer.count += 1
        skew_ms = peer.skew_ms
        if abs(skew_ms) > TOLERATED_MS or peer.reported_ms:
            self._report(sender[1], peer, skew_ms)
        return skew_ms

    def _report(self, sender: str, peer: _Peer, skew_ms: int) -> None:
        is_certain = skew_ms < 0 or peer.count >= MIN_MESSAGES
        if is_certain and abs(skew_ms - peer.reported_ms) > max(TOLERATED_MS, abs(peer.reported_ms) // 2):
            peer.reported_ms = skew_ms
            log.warning(
                "clock skew, deadlines are converted", extra={"peer": sender, "ahead_of_peer_s": skew_ms / 1000}
            )

    def _forget_oldest(self) -> None:
        del self._peers[min(self._peers, key=lambda sender: self._peers[sender].received_s)]
