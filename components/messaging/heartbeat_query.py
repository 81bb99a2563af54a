"""Query a role's workers for a heartbeat, without a subscription."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from components.discovery.book import InstanceBook
from components.errors import MalformedMessage, MeshError
from components.messaging.bus import Bus
from components.messaging.liveness import HUNG_AFTER_S
from components.messaging.scatter_gather import ask_all
from components.wire.codec import pack, unpack
from components.wire.heartbeat import AskHeartbeat, Heartbeat
from components.wire.instances import Role

ANSWER_TIMEOUT_S: Final = 0.5
KEPT_S: Final = 1.0  # answers are reused, as a query costs two messages a worker


class HeartbeatAnswers:
    def __init__(self, beats: dict[str, Heartbeat]) -> None:
        self.beats = beats

    def last_heartbeat(self, instance_id: str) -> Heartbeat | None:
        return self.beats.get(instance_id)

    def is_lost(self, instance_id: str) -> bool:
        beat = self.beats.get(instance_id)
        return beat is None or beat.still_s > HUNG_AFTER_S


class HeartbeatQuery:
    def __init__(
        self, bus: Bus, namespace: str, role: Role, book: InstanceBook, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._role = role
        self._book = book
        self._clock = clock
        self._answers = HeartbeatAnswers({})
        self._answered_s = -math.inf
        self._turn = asyncio.Lock()

    async def answers(self) -> HeartbeatAnswers:
        """The answers within ANSWER_TIMEOUT_S, at most KEPT_S old; none while NATS is unreachable."""
        async with self._turn:
            if self._clock() - self._answered_s > KEPT_S:
                beats: dict[str, Heartbeat] = {}
                if self._bus.client.is_connected:
                    with suppress(MeshError):  # the bus reports its own outages
                        await self._ask(beats)
                self._answers, self._answered_s = HeartbeatAnswers(beats), self._clock()
            return self._answers

    async def _ask(self, beats: dict[str, Heartbeat]) -> None:
        missing = {record.instance_id: record.epoch for record in self._book.of_role(self._role)}

        def receive(data: bytes) -> bool:
            try:
                beat = unpack(data, Heartbeat)
            except MalformedMessage as exc:
                self._bus.refusals.count("ask_heartbeat", exc)
                return False
            if missing.get(beat.instance_id) == beat.epoch:
                beats[beat.instance_id] = beat
                del missing[beat.instance_id]
            return not missing

        if missing:
            subject = f"{self._namespace}.{self._role}.ask_heartbeat"
            await ask_all(self._bus, subject, pack(AskHeartbeat()), receive, wait_s=ANSWER_TIMEOUT_S)
