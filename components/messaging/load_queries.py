"""Query workers for load and cached blocks of a prompt, in a fleet too large to subscribe to."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Final, Self

from components.aio import BackgroundTasks, background
from components.errors import MeshError
from components.messaging.bus import Bus
from components.messaging.liveness import EVERY_S, Liveness
from components.messaging.refusals import STRANGER
from components.routing.candidates import Allowance
from components.wire.heartbeat import AskHeartbeat, Heartbeat
from components.wire.instances import InstanceRecord

ANSWER_TIMEOUT_S: Final = 0.1  # after this time the prompt is routed without the answer
CALL_TIMEOUT_S: Final = 1.0  # before the bus repeats the call, because `run` sends a new one
MAX_BACKOFF_S: Final = 5.0  # between queries to a lost instance


class LoadQueries:
    def __init__(self, bus: Bus, alive: Liveness, per_s: Callable[[], float], rng: Random) -> None:
        self._bus = bus
        self._alive = alive
        self._per_s = per_s
        self._rng = rng
        self._allowance = Allowance()
        self._asking: dict[str, asyncio.Task[int | None]] = {}  # latest, by instance id
        self._tasks = BackgroundTasks()
        self._waits: dict[str, tuple[float, float]] = {}  # of lost instances: seconds, and monotonic end

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Query the instances of `Liveness.to_query`, at most `per_s()` times a second."""
        try:
            async with background(self.run(), "ask-heartbeats"):
                yield self
        finally:
            await self._tasks.close()

    def reserve(self, wanted: int) -> int:
        return self._allowance.reserve(wanted, self._per_s(), time.monotonic())

    async def ask(self, records: Sequence[InstanceRecord], hashes: Mapping[str, bytes]) -> dict[str, int | None]:
        """Query instances and wait for at most ANSWER_TIMEOUT_S. Skip those with an older unanswered query.

        Args:
            hashes: by instance id, blocks of a prompt in rising depth, 16 bytes each.

        Returns: by instance id, how many of its `hashes` are cached; None if the answer is late. Instances that
        take no new work are left out.
        """
        asked = {
            record.instance_id: self._ask(record, hashes[record.instance_id])
            for record in records
            if self._alive.unanswered_s(record.instance_id) < ANSWER_TIMEOUT_S
        }
        if asked:
            await asyncio.wait(asked.values(), timeout=ANSWER_TIMEOUT_S)
        late = {i: None for i, task in asked.items() if not task.done()}
        answers = {i: task.result() for i, task in asked.items() if task.done() and not task.cancelled()}
        usable = {i: cached for i, cached in answers.items() if cached is not None and self._alive.is_usable(i)}
        return {**late, **usable}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._alive.queries_instances or not self._bus.client.is_connected:
                continue
            now = time.monotonic()
            self._waits = {i: wait for i, wait in self._waits.items() if self._alive.find(i) is not None}
            due = [
                record
                for record in self._alive.to_query()
                if record.instance_id not in self._asking and now >= self._waits.get(record.instance_id, (0.0, 0.0))[1]
            ]
            for record in self._rng.sample(due, self.reserve(len(due))):
                self._ask(record, b"")

    def _ask(self, record: InstanceRecord, hashes: bytes) -> asyncio.Task[int | None]:
        task = self._tasks.start(self._answer(record, hashes), f"ask {record.instance_id}")
        self._asking[record.instance_id] = task
        return task

    async def _answer(self, record: InstanceRecord, hashes: bytes) -> int | None:
        instance_id = record.instance_id
        self._alive.note_query(instance_id)
        subject = f"{record.subject}.ask_heartbeat"
        try:
            beat = await self._bus.call(subject, AskHeartbeat(hashes=hashes), Heartbeat, timeout_s=CALL_TIMEOUT_S)
        except MeshError:
            if self._alive.is_lost(instance_id):
                wait_s = min(2 * self._waits.get(instance_id, (EVERY_S / 2, 0.0))[0], MAX_BACKOFF_S)
                self._waits[instance_id] = wait_s, time.monotonic() + wait_s
            return None
        finally:
            if self._asking.get(instance_id) is asyncio.current_task():
                del self._asking[instance_id]
        self._waits.pop(instance_id, None)
        if beat.instance_id != instance_id or not self._alive.record_heartbeat(beat):
            self._bus.refusals.count("ask_heartbeat", STRANGER)
            return None
        return beat.cached
