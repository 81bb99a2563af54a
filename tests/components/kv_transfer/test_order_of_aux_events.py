"""An aux slot that is reused at once, with writes in every order: only its own complete record completes a transfer."""

import asyncio
from collections.abc import Callable
from itertools import permutations
from typing import Final

import pytest

from components.errors import KvCorrupt
from components.kv_transfer.aux import DAMAGED_AFTER_S, HEAD, AuxArrivals, AuxBuffer, AuxRecord
from components.kv_transfer.own_thread import OwnThread
from components.wire.logprobs import TokenLogprobs

pytestmark = pytest.mark.anyio

OLD: Final = AuxRecord(1, 5, 7, 3, (1, 2, 3), logprobs=TokenLogprobs(-0.5, ((7, -0.5),)))
NEW: Final = AuxRecord(2, 5, 8, 3, (4, 5, 6), logprobs=TokenLogprobs(-0.25, ((8, -0.25),)))
SUMS: Final = 4


def sealed(record: AuxRecord, notification: str) -> bytes:
    sender = AuxBuffer(1, SUMS)
    sender.write(0, record)
    sender.seal(0, notification)
    return sender.raw(0)


OLD_BYTES, NEW_BYTES = sealed(OLD, "old"), sealed(NEW, "new")


class Slot:
    """One slot, which the next transfer takes in the turn in which the last one frees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        self.aux = AuxBuffer(1, SUMS)
        self.arrivals = AuxArrivals(self.aux, OwnThread("NIXL", lambda: None))
        old = self.arrivals.expect("old", self.aux.take())
        old.cancel()
        self.aux.give_back(0)
        self.landed = self.arrivals.expect("new", self.aux.take())
        middle = HEAD.itemsize // 2
        self.events: dict[str, Callable[[], None]] = {
            "old": lambda: self.write(0, OLD_BYTES),
            "head": lambda: self.write(0, NEW_BYTES[:middle]),
            "rest": lambda: self.write(middle, NEW_BYTES[middle : HEAD.itemsize]),
            "sums": lambda: self.write(HEAD.itemsize, NEW_BYTES[HEAD.itemsize :]),
            "poll_often": lambda: self.arrivals.poll_often("new"),
        }

    def write(self, at: int, data: bytes) -> None:
        self.aux._memory[0, at : at + len(data)] = list(data)

    def poll(self) -> None:
        self.now_s += 0.01  # after the next poll of all slots
        self.arrivals.poll()

    @property
    def is_new(self) -> bool:
        return self.aux.raw(0) == NEW_BYTES


async def test_a_record_completes_its_own_transfer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for order in permutations(["old", "head", "rest", "sums", "poll_often"]):
        slot = Slot(monkeypatch)
        await asyncio.sleep(0)
        for name in order:
            was_landed = slot.landed.done()
            slot.events[name]()
            slot.poll()
            if not was_landed:
                assert slot.landed.done() == slot.is_new, (order, name)
        if slot.landed.done():
            assert slot.landed.exception() is None
            continue
        for _ in range(3):  # announced, and another seal stays
            slot.now_s += DAMAGED_AFTER_S
            slot.poll()
        assert isinstance(slot.landed.exception(), KvCorrupt), order
