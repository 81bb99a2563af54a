"""Poll aux slots for complete records of peers."""

import asyncio
import time
from typing import Final

from components.errors import KvCorrupt
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.own_thread import OwnThread

POLL_COMING_S: Final = 0.0002
POLL_EXPECTED_S: Final = 0.005  # frequent polls slow down the prompt's computation
LINGER_POLLS: Final = 200  # after an arrival: its writer may still need our progress
COMING_S: Final = 1.0


class Arrivals:
    """Event loop and thread share state by atomic operations only."""

    def __init__(self, aux: AuxBuffer, thread: OwnThread) -> None:
        self._aux = aux
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, tuple[int, asyncio.Future[None]]] = {}  # slot by notification
        self._coming: dict[str, float] = {}  # announced ones; polled often until this time
        self._look_at_all_s = 0.0  # next time for the others
        self._linger = 0  # polls left while no slot is expected

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._expected[notification] = slot, future
        future.add_done_callback(lambda done: self._forget(notification, done))
        if len(self._expected) == 1:  # else the thread polls already
            self._thread.wake()
        return future

    def hasten(self, notification: str) -> None:
        """Complete the slot if it has landed, else poll it often."""
        if notification in self._expected and not self._look_at(notification):
            is_looking = self._looks_often()
            self._coming[notification] = time.monotonic() + COMING_S
            if not is_looking:
                self._thread.wake()

    def patience_s(self) -> float | None:
        if not self._expected and not self._linger:
            return None
        return POLL_COMING_S if self._looks_often() else POLL_EXPECTED_S

    def begin_look(self) -> bool:
        """Return whether peers need our progress."""
        if self._expected:
            return True
        lingers = self._linger > 0
        self._linger -= lingers
        return lingers

    def look(self) -> None:
        """Poll announced slots, and at times all: an announcement may be lost."""
        now_s = time.monotonic()
        if now_s < self._look_at_all_s:
            for notification in list(self._coming):
                self._look_at(notification)
            return
        self._look_at_all_s = now_s + POLL_EXPECTED_S
        for notification in list(self._expected):
            # before its announcement, a wrong seal is another transfer's
            if not self._look_at(notification) and notification in self._coming:
                self._look_for_damage(notification, now_s)

    def _looks_often(self) -> bool:
        if not self._coming:
            return False
        now_s = time.monotonic()
        return any(until_s > now_s for until_s in self._coming.copy().values())

    def _look_at(self, notification: str) -> bool:
        """Call it on either thread."""
        slot, future = self._expected.get(notification, (0, None))
        if future is None or not self._aux.is_sealed(slot, notification):
            return False
        self._linger = LINGER_POLLS
        self._expected.pop(notification, None)
        self._thread.settle(future)
        return True

    def _look_for_damage(self, notification: str, now_s: float) -> None:
        slot, future = self._expected.get(notification, (0, None))
        if future is not None and self._aux.is_damaged(slot, now_s):
            self._linger = LINGER_POLLS
            self._thread.settle(future, error=KvCorrupt("the aux slot did not arrive as prefill wrote it"))

    def _forget(self, notification: str, future: asyncio.Future[None]) -> None:
        self._expected.pop(notification, None)
        self._coming.pop(notification, None)
        if not future.cancelled():
            future.exception()  # retrieved, in case its caller has gone
