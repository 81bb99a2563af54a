"""Polls instances while `/ui` is open: prefill workers for heartbeats, frontends for their load, and a few instances at
a time for their status.
"""

import asyncio
import time
from contextlib import suppress
from itertools import islice
from typing import Final

from components.discovery.book import InstanceBook
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.heartbeat_query import HeartbeatQuery
from components.wire.instances import InstanceRecord
from components.wire.load import AskLoad, Load
from components.wire.status import Status, StatusRequest
from services.frontend.ui.feed import Feed
from services.frontend.ui.mesh_load import MeshLoad
from services.frontend.ui.mesh_view import ROLES, Reports

EVERY_S: Final = 1.0
MAX_ASKED_PER_S: Final = 200  # 40 µs of processor time each; in a larger mesh each instance is asked less often
AT_ONCE: Final = 8
ANSWER_S: Final = 1.0


class StatusPoll:
    def __init__(
        self, me: str, bus: Bus, book: InstanceBook, prefills: HeartbeatQuery, *, reports: Reports, load: MeshLoad
    ) -> None:
        """`me`: instance id of this frontend."""
        self._me = me
        self._load = load
        self._bus = bus
        self._book = book
        self._prefills = prefills
        self._reports = reports
        self._asked = ""  # instance id of the last one, in the order of ids

    async def run(self, feed: Feed) -> None:
        while True:
            await feed.watched()
            began = time.monotonic()
            await self.once()
            await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))

    async def once(self) -> None:
        if not self._bus.is_connected:
            return
        prefills = await self._prefills.answers()
        if not self._bus.is_connected:
            return  # none could answer
        self._reports.prefills = prefills
        turn = asyncio.Semaphore(AT_ONCE)
        frontends = [record for record in self._book.of_role("frontend") if record.instance_id != self._me]
        await asyncio.gather(
            *(self._ask(record, turn) for record in self._next()),
            *(self._ask_load(record, turn) for record in frontends),
        )

    def _next(self) -> list[InstanceRecord]:
        records = sorted((r for role in ROLES for r in self._book.of_role(role)), key=lambda r: r.instance_id)
        here = {record.instance_id for record in records}
        for answers in (self._reports.statuses, self._reports.unanswered):
            for instance_id in answers.keys() - here:
                del answers[instance_id]
        after = [r for r in records if r.instance_id > self._asked]
        before = [r for r in records if r.instance_id <= self._asked]
        chosen = list(islice((*after, *before), MAX_ASKED_PER_S))
        if chosen:
            self._asked = chosen[-1].instance_id
        return chosen

    async def _ask(self, record: InstanceRecord, turn: asyncio.Semaphore) -> None:
        async with turn:
            with suppress(MeshError):
                subject = f"{record.subject}.status"
                status = await self._bus.call(subject, StatusRequest(), Status, timeout_s=ANSWER_S)
                self._reports.statuses[record.instance_id] = status
                self._reports.unanswered.pop(record.instance_id, None)
                return
        unanswered = self._reports.unanswered
        unanswered[record.instance_id] = unanswered.get(record.instance_id, 0) + 1

    async def _ask_load(self, record: InstanceRecord, turn: asyncio.Semaphore) -> None:
        ask = AskLoad(after_unix_s=self._load.last_unix_s(record.instance_id))
        async with turn:
            with suppress(MeshError):
                load = await self._bus.call(f"{record.subject}.load", ask, Load, timeout_s=ANSWER_S)
                self._load.add(record.instance_id, load.samples)
