"""Rooms without a transfer: offers that arrived before their request, and ids of requests that have ended."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final

from components.discovery.registry import Registry
from components.errors import MeshError, TransferFailed
from components.messaging.bus import Bus
from components.messaging.failed_rooms import report_room_failed
from components.wire.prefill import CloseRooms, PagesOffered, PrefillRequest

CLOSE_INTERVAL_S: Final = 0.02
EARLY_OFFER_EXPIRY_S: Final = 10.0  # decode's timeout for an answer
MAX_EARLY_OFFERS: Final = 4096
ENDED_ID_EXPIRY_S: Final = 60.0  # longer than any message is delayed


class Rooms:
    def __init__(
        self, bus: Bus, registry: Registry, in_background: Callable[[Coroutine[Any, Any, None], str], None]
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._in_background = in_background
        self._closing: dict[str, list[str]] = {}  # by bootstrap instance
        self._early: dict[tuple[str, str], PagesOffered] = {}  # by request id and room
        self._ended: OrderedDict[str, float] = OrderedDict()  # end by request id

    def keep_early(self, offer: PagesOffered) -> bool:
        """Keep an offer until its request arrives. Returns False if the request has ended, or too many offers are kept."""
        if offer.request_id in self._ended or len(self._early) >= MAX_EARLY_OFFERS:
            return False
        key = offer.request_id, offer.room  # an offer with a wrong room must not replace the right one
        if (other := self._early.get(key)) is not None:  # from another bootstrap replica
            self.close_later(other)
        self._early[key] = offer
        asyncio.get_running_loop().call_later(EARLY_OFFER_EXPIRY_S, self._expire, offer)
        return True

    def take_early(self, request_id: str, room: str) -> PagesOffered | None:
        return self._early.pop((request_id, room), None)

    def end(self, request_id: str) -> None:
        """Refuse this id from now on: a late or repeated message must not cause a write."""
        for key in [key for key in self._early if key[0] == request_id]:
            self.close_later(self._early.pop(key))
        now_s = time.monotonic()
        self._ended[request_id] = now_s
        self._ended.move_to_end(request_id)
        while self._ended and now_s - next(iter(self._ended.values())) > ENDED_ID_EXPIRY_S:
            self._ended.popitem(last=False)

    def has_ended(self, request_id: str) -> bool:
        return request_id in self._ended

    def close_later(self, offer: PagesOffered) -> None:
        if not self._closing:
            # An empty context, because one message closes the rooms of many requests.
            asyncio.get_running_loop().call_later(CLOSE_INTERVAL_S, self.send_closes, context=Context())
        self._closing.setdefault(offer.bootstrap_id, []).append(offer.room)

    def send_closes(self) -> None:
        closing, self._closing = self._closing, {}
        for bootstrap_id, rooms in closing.items():
            bootstrap = self._registry.book.find("bootstrap", bootstrap_id)
            if bootstrap is not None:
                closing_rooms = self._bus.publish(f"{bootstrap.subject}.close", CloseRooms(rooms=rooms))
                self._in_background(closing_rooms, f"close rooms at {bootstrap_id}")

    async def notify_decode(self, of: PrefillRequest | PagesOffered, error: MeshError) -> None:
        """Report a failed transfer. That of a request must have no write in flight."""
        decode = self._registry.book.find("decode", of.decode_id)
        if decode is not None:
            stamp = of.stamp if isinstance(of, PrefillRequest) else 0
            await report_room_failed(self._bus, decode.subject, of.request_id, of.room, error, stamp=stamp)

    def _expire(self, offer: PagesOffered) -> None:
        if self._early.get((offer.request_id, offer.room)) is offer:
            self.end(offer.request_id)
            error = TransferFailed(f"room {offer.room} is unknown to this prefill instance")
            self._in_background(self.notify_decode(offer, error), f"notify {offer.decode_id}")
