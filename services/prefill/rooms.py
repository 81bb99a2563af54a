"""Rooms that nothing is computed for: offers that came before their question, requests that are over, and the word of both."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Final

from components.discovery.registry import Registry
from components.errors import MeshError, TransferFailed
from components.messaging.bus import Bus
from components.wire.prefill import PrefillRequest
from components.wire.rooms import CloseRooms, PagesOffered, RoomFailed

log = logging.getLogger(__name__)

CLOSE_EVERY_S: Final = 0.02
EARLY_FOR_S: Final = 10.0  # as long as decode waits for an answer to its question
MAX_EARLY: Final = 4096
OVER_FOR_S: Final = 60.0  # longer than any message is late


class Rooms:
    """See the module."""

    def __init__(self, bus: Bus, registry: Registry, keep: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`keep` runs in the background what is said to others."""
        self._bus = bus
        self._registry = registry
        self._keep = keep
        self._closing: dict[str, list[str]] = {}  # rooms that are over, by bootstrap instance
        self._early: dict[str, PagesOffered] = {}  # pages for prompts that nobody has asked for yet
        self._over: OrderedDict[str, float] = OrderedDict()  # request ids that are over here, and since when

    def hold(self, offer: PagesOffered) -> bool:
        """Keep pages until their question comes. Returns: whether that is possible; not of what is over, nor too many."""
        if offer.request_id in self._over or len(self._early) >= MAX_EARLY:
            return False
        if (other := self._early.get(offer.request_id)) is not None:  # by another bootstrap replica
            self.close_later(other)
        self._early[offer.request_id] = offer
        asyncio.get_running_loop().call_later(EARLY_FOR_S, self._too_early, offer)
        return True

    def take(self, request_id: str) -> PagesOffered | None:
        """What was kept for this question."""
        return self._early.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Nothing is begun under this name any more: a question or an offer that comes late, or twice, is refused."""
        if (offer := self.take(request_id)) is not None:
            self.close_later(offer)
        now_s = time.monotonic()
        self._over[request_id] = now_s
        self._over.move_to_end(request_id)
        while self._over and now_s - next(iter(self._over.values())) > OVER_FOR_S:
            self._over.popitem(last=False)

    def is_over(self, request_id: str) -> bool:
        """Whether a request of this name was here a short while ago."""
        return request_id in self._over

    def close_later(self, offer: PagesOffered) -> None:
        """Nobody waits for a room to close: those of some milliseconds go together."""
        if not self._closing:
            asyncio.get_running_loop().call_later(CLOSE_EVERY_S, self.close)
        self._closing.setdefault(offer.bootstrap_id, []).append(offer.room)

    def close(self) -> None:
        """Tell of all rooms that are over."""
        closing, self._closing = self._closing, {}
        for bootstrap_id, rooms in closing.items():
            bootstrap = self._registry.book.find(bootstrap_id)
            if bootstrap is not None:
                self._keep(self._bus.publish(f"{bootstrap.subject}.close", CloseRooms(rooms=rooms)))

    async def tell_decode(self, of: PrefillRequest | PagesOffered, error: MeshError) -> None:
        """Why its pages will not be written."""
        decode = self._registry.book.find(of.decode_id)
        if decode is None:
            return
        failed = RoomFailed(request_id=of.request_id, room=of.room, error=type(error).__name__, cause=error.message)
        try:
            await self._bus.publish(f"{decode.subject}.room_failed", failed)
        except MeshError as exc:
            log.warning("decode not told", extra={"room": of.room, "cause": exc.message})

    def _too_early(self, offer: PagesOffered) -> None:
        """Nobody has asked for what these pages are for."""
        if self._early.get(offer.request_id) is offer:
            self.end(offer.request_id)
            error = TransferFailed(f"room {offer.room} is unknown to this prefill instance")
            self._keep(self.tell_decode(offer, error))
