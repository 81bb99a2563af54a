"""The aux buffer: what goes from prefill to decode beside the pages, written last, so that its stamp says all has landed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from components.errors import QueueFull

SLOT: Final = np.dtype(
    [
        ("stamp", "<u8"),  # the room's; 0 while nothing has landed
        ("num_pages", "<u4"),  # of the receiver's size
        ("first_token", "<i4"),
        ("num_cached_tokens", "<u4"),  # prompt tokens that prefill found in its own cache
        ("reserved", "V44"),  # up to one cache line
    ]
)
SLOTS: Final = 1024


@dataclass(frozen=True, slots=True)
class AuxRecord:
    """What one slot says."""

    stamp: int
    num_pages: int
    first_token: int
    num_cached_tokens: int


class AuxBuffer:
    """SLOTS slots of SLOT.itemsize bytes in host memory, registered with the transfer backend like the pages."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = np.zeros(slots, dtype=SLOT)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def address(self) -> int:
        """Of slot 0."""
        return int(self._slots.ctypes.data)

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return int(self._slots.nbytes)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A cleared slot. Raises: QueueFull, when none is free."""
        if not self._free:
            raise QueueFull(f"all {len(self._slots)} aux slots are taken: too many transfers at once")
        slot = self._free.pop()
        self._slots[slot] = np.zeros((), dtype=SLOT)
        return slot

    def give_back(self, slot: int) -> None:
        """No transfer touches the slot any more."""
        assert slot not in self._free, f"aux slot {slot} is free already"
        self._free.append(slot)

    def write(self, slot: int, record: AuxRecord) -> None:
        """Fill a slot on the sending side."""
        row = self._slots[slot]
        row["stamp"] = record.stamp
        row["num_pages"] = record.num_pages
        row["first_token"] = record.first_token
        row["num_cached_tokens"] = record.num_cached_tokens

    def read(self, slot: int) -> AuxRecord:
        """What stands in a slot on the receiving side."""
        row = self._slots[slot]
        return AuxRecord(
            int(row["stamp"]), int(row["num_pages"]), int(row["first_token"]), int(row["num_cached_tokens"])
        )
