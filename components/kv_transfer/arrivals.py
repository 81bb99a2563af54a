"""What peers are to write into our aux slots, seen by looking: a slot says itself that it is whole, and for which room."""

import asyncio
import time
from typing import Final

from components.errors import KvCorrupt
from components.kv_transfer.aux import AuxBuffer
from components.kv_transfer.own_thread import OwnThread

POLL_COMING_S: Final = 0.0002
POLL_EXPECTED_S: Final = 0.005  # until a peer says that one is coming: looking often slows down who computes it
LINGER_POLLS: Final = 200  # after bytes have landed: to hear that they have, the writer may still need us, for a second
COMING_S: Final = 1.0  # that a peer who says that it is about to write is looked for often


class Arrivals:
    """Expected on the event loop, looked for on the thread that polls; each access to what both use is one atomic operation."""

    def __init__(self, aux: AuxBuffer, thread: OwnThread) -> None:
        """`thread` is woken when there is something to look for, and tells those who wait."""
        self._aux = aux
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, tuple[int, asyncio.Future[None]]] = {}  # slots, by what they are sealed for
        self._coming: dict[str, float] = {}  # of these, what is about to be written; until when it is looked for often
        self._look_at_all_s = 0.0  # when; the others are looked at each time
        self._linger = 0  # polls that are to come though nothing is expected

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        """See `KvTransfer.expect`."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._expected[notification] = slot, future
        future.add_done_callback(lambda done: self._forget(notification, done))
        if len(self._expected) == 1:  # else the thread is looking already
            self._thread.wake()
        return future

    def hasten(self, notification: str) -> None:
        """See `KvTransfer.hasten`; what has landed by now is told at once."""
        if notification in self._expected and not self._look_at(notification):
            is_looking = self._looks_often()
            self._coming[notification] = time.monotonic() + COMING_S
            if not is_looking:
                self._thread.wake()

    def patience_s(self) -> float | None:
        """Until the next look; None while nothing is expected or has just arrived."""
        if not self._expected and not self._linger:
            return None
        return POLL_COMING_S if self._looks_often() else POLL_EXPECTED_S

    def begin_look(self) -> bool:
        """Whether peers need our progress, because something is expected, or for a while after it has arrived."""
        if self._expected:
            return True
        lingers = self._linger > 0
        self._linger -= lingers
        return lingers

    def look(self) -> None:
        """Tell of what has landed of what is coming, and at times of everything: a hint may get lost, or come to nothing."""
        now_s = time.monotonic()
        if now_s < self._look_at_all_s:
            for notification in list(self._coming):
                self._look_at(notification)
            return
        self._look_at_all_s = now_s + POLL_EXPECTED_S
        for notification in list(self._expected):
            if not self._look_at(notification) and notification in self._coming:  # before, it can only be another's
                self._look_for_damage(notification, now_s)

    def _looks_often(self) -> bool:
        if not self._coming:
            return False
        now_s = time.monotonic()
        return any(until_s > now_s for until_s in self._coming.copy().values())

    def _look_at(self, notification: str) -> bool:
        """Whether the slot is written; whoever expects it is told. On either thread."""
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
            future.exception()  # seen: whoever waited may have gone
