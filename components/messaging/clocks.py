"""How far the clocks of other processes are off, measured by their messages, and their deadlines by our own clock.

Each message with a deadline says when it was sent. Our time of arrival minus that is the skew plus the time it was on its
way. The smallest of a peer's recent differences is the skew plus the shortest way, and that is what its deadlines are
moved by. One message's own difference would be wrong: a message that waited for half a minute in the socket of a frozen
process must count as late.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from components.messaging.deadline import now_ms
from components.wire.dated import Dated

log = logging.getLogger(__name__)

TOLERATED_MS: Final = 1000  # a smaller skew is neither reported nor converted: deadlines are tens of seconds away
WINDOW_S: Final = (
    30.0  # differences count for one to two windows: so long a clock that was set back makes deadlines early
)
FORGET_S: Final = 600.0  # a peer without messages
MIN_MESSAGES: Final = 3  # before a positive skew is reported: fewer may all have been late

D = TypeVar("D", bound=Dated)


@dataclass(slots=True)
class _Peer:
    """Differences in milliseconds, the smallest of this window and of the one before."""

    since_s: float
    smallest: int
    before: int
    heard_s: float
    count: int = 0
    told: int = 0  # the skew that was last reported

    @property
    def skew_ms(self) -> int:
        return min(self.smallest, self.before)


class PeerClocks(Collector):
    """The clocks of the processes that send to this one; `clock_skew_seconds` is the largest skew among them."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def converted(self, message: D) -> D:
        """`message` with its deadline by our clock."""
        if not message.sent_unix_ms:
            return message
        skew_ms = self._measure(message.sender, now_ms() - message.sent_unix_ms)
        if abs(skew_ms) <= TOLERATED_MS:
            return message
        return replace(message, deadline_unix_ms=message.deadline_unix_ms + skew_ms)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metric as Prometheus reads it."""
        self._forget()
        largest_ms = max((abs(peer.skew_ms) for peer in self._peers.values()), default=0)
        yield GaugeMetricFamily(
            "clock_skew_seconds",
            "Largest difference between this process's clock and one of a process that sends to it, the shortest way included.",
            value=largest_ms / 1000,
        )

    def _measure(self, sender: str, difference_ms: int) -> int:
        now_s = time.monotonic()
        peer = self._peers.get(sender)
        if peer is None:
            self._forget()
            peer = self._peers[sender] = _Peer(now_s, difference_ms, difference_ms, now_s)
        elif now_s - peer.since_s > WINDOW_S:  # only now: a frozen process keeps what it knew before it froze
            peer.since_s, peer.before, peer.smallest = now_s, peer.smallest, difference_ms
        peer.smallest = min(peer.smallest, difference_ms)
        peer.heard_s = now_s
        peer.count += 1
        skew_ms = peer.skew_ms
        if abs(skew_ms) > TOLERATED_MS or peer.told:
            self._report(sender, peer, skew_ms)
        return skew_ms

    def _report(self, sender: str, peer: _Peer, skew_ms: int) -> None:
        """Say once what the skew of a peer is, and again when it has become another one."""
        is_certain = skew_ms < 0 or peer.count >= MIN_MESSAGES
        if is_certain and abs(skew_ms - peer.told) > max(TOLERATED_MS, abs(peer.told) // 2):
            peer.told = skew_ms
            log.warning(
                "clock skew, deadlines are converted", extra={"peer": sender, "ahead_of_peer_s": skew_ms / 1000}
            )

    def _forget(self) -> None:
        """Drop peers that have gone."""
        now_s = time.monotonic()
        for sender in [name for name, peer in self._peers.items() if now_s - peer.heard_s > FORGET_S]:
            del self._peers[sender]
