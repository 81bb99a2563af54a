"""KV transfers between this worker and others, by peer."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from components.telemetry.recent import RecentSum
from components.wire.status import LinkStatus

Ends = tuple[str, str]  # instance ids of prefill and decode

MAX_LINKS: Final = 256  # least recently used peers beyond these are forgotten


class _Link:
    __slots__ = ("failures", "num_bytes", "recent", "seconds", "transfers")

    def __init__(self) -> None:
        self.transfers = self.failures = self.num_bytes = 0
        self.seconds = 0.0
        self.recent = RecentSum()


class Links:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, _Link] = OrderedDict()  # by instance id, the most recently used last

    def transferred(self, peer: str, num_bytes: int, seconds: float) -> None:
        link = self._link(peer)
        link.transfers += 1
        link.num_bytes += num_bytes
        link.seconds += seconds
        link.recent.add(num_bytes, self._clock())

    def failed(self, peer: str) -> None:
        self._link(peer).failures += 1

    def shown(self) -> list[LinkStatus]:
        now_s = self._clock()
        return [
            LinkStatus(
                peer=peer,
                transfers=link.transfers,
                failures=link.failures,
                bytes=link.num_bytes,
                seconds=link.seconds,
                bytes_per_s=link.recent.per_s(now_s),
            )
            for peer, link in self._links.items()
        ]

    def _link(self, peer: str) -> _Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link()
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)
        else:
            self._links.move_to_end(peer)
        return link


def links_between(known: Mapping[str, str], reported: Mapping[str, Sequence[LinkStatus]]) -> dict[Ends, LinkStatus]:
    """Both ends count a transfer. The larger count is used, because a restarted end counts from zero.

    Args:
        known: roles by instance id.
        reported: each instance's links, by instance id.
    """
    ends: dict[Ends, list[LinkStatus]] = {}
    for instance_id, links in reported.items():
        for link in links:
            if instance_id in known and link.peer in known:
                pair = (instance_id, link.peer) if known[instance_id] == "prefill" else (link.peer, instance_id)
                ends.setdefault(pair, []).append(link)
    return {pair: _larger(found) for pair, found in ends.items()}


def _larger(ends: Sequence[LinkStatus]) -> LinkStatus:
    return LinkStatus(
        peer=ends[0].peer,
        transfers=max(end.transfers for end in ends),
        failures=max(end.failures for end in ends),
        bytes=max(end.bytes for end in ends),
        seconds=max(end.seconds for end in ends),
        bytes_per_s=max(end.bytes_per_s for end in ends),
    )
