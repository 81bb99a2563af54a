"""Poll our aux slots for what peers write: a slot's seal tells that it is whole, and for which room."""

import asyncio
import time
from typing import Final

from components.errors import KvCorrupt
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.own_thread import OwnThread

POLL_COMING_S: Final = 0.0002
POLL_EXPECTED_S: Final = (
    0.005  # until a peer announces its last pages: frequent polls slow down the prompt's computation
)
LINGER_POLLS: Final = 200  # after an arrival: the writer may need our progress for up to a second to complete its write
COMING_S: Final = 1.0  # an announced slot is polled often for this long


class Arrivals:
    """Slots are expected on the event loop and polled on the thread; each access to shared state is one atomic
    operation.
    """

    def __init__(self, aux: AuxBuffer, thread: OwnThread) -> None:
        """`thread` is woken to poll, and completes the futures."""
        self._aux = aux
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, tuple[int, asyncio.Future[None]]] = {}  # slots by seal
        self._coming: dict[str, float] = {}  # the announced ones among them; polled often until this time
        self._look_at_all_s = 0.0  # next time for the others
        self._linger = 0  # polls to come though nothing is expected

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._expected[notification] = slot, future
        future.add_done_callback(lambda done: self._forget(notification, done))
        if len(self._expected) == 1:  # otherwise the thread is polling already
            self._thread.wake()
        return future

    def hasten(self, notification: str) -> None:
        """Complete at once if it has landed."""
        if notification in self._expected and not self._look_at(notification):
            is_looking = self._looks_often()
            self._coming[notification] = time.monotonic() + COMING_S
            if not is_looking:
                self._thread.wake()

    def patience_s(self) -> float | None:
        """Seconds until the next poll; None if nothing is expected or has just arrived."""
        if not self._expected and not self._linger:
            return None
        return POLL_COMING_S if self._looks_often() else POLL_EXPECTED_S

    def begin_look(self) -> bool:
        """Whether peers need our progress: something is expected, or arrived a moment ago."""
        if self._expected:
            return True
        lingers = self._linger > 0
        self._linger -= lingers
        return lingers

    def look(self) -> None:
        """Look at announced slots, and from time to time at all: an announcement may be lost, or come to nothing."""
        now_s = time.monotonic()
        if now_s < self._look_at_all_s:
            for notification in list(self._coming):
                self._look_at(notification)
            return
        self._look_at_all_s = now_s + POLL_EXPECTED_S
        for notification in list(self._expected):
            if (
                not self._look_at(notification) and notification in self._coming
            ):  # announced before, so it was another slot's
                self._look_for_damage(notification, now_s)

    def _looks_often(self) -> bool:
        if not self._coming:
            return False
        now_s = time.monotonic()
        return any(until_s > now_s for until_s in self._coming.copy().values())

    def _look_at(self, notification: str) -> bool:
        """Complete the future if the slot is written. On either thread."""
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
