"""KV transfers between this worker and others, by peer."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from components.telemetry.recent import RecentSum
from components.wire.status import LinkStatus

MAX_LINKS: Final = 256  # peers that were used last


class _Link:
    __slots__ = ("failures", "num_bytes", "recent", "seconds", "transfers")

    def __init__(self) -> None:
        self.transfers = self.failures = self.num_bytes = 0
        self.seconds = 0.0
        self.recent = RecentSum()


class Links:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: OrderedDict[str, _Link] = OrderedDict()  # by instance id, the last used at the end

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
