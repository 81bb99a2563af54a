"""The aux buffer: what goes from prefill to decode beside the pages, written last, so that it says all has landed.

A slot is a head of whole cache lines and, where workers said how many pages a request may have, room for a checksum a page.
"""

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from zlib import crc32

import numpy as np

from components.errors import MalformedMessage, QueueFull
from components.wire.logprobs import TokenLogprobs

MAX_ALTERNATIVES: Final = 20  # as many as OpenAI's `top_logprobs` may ask for
HEAD: Final = np.dtype(
    [
        ("stamp", "<u8"),  # the room's; 0 while nothing has landed
        ("num_pages", "<u4"),  # of the receiver's size
        ("first_token", "<i4"),
        ("num_cached_tokens", "<u4"),  # prompt tokens that prefill found in its own cache
        ("checked", "<u4"),  # 1 + page checksums behind the head; 0: nobody asked for any
        ("told", "<u4"),  # 1 + alternatives to the first token; 0: nobody asked for its log-probability
        ("logprob", "<f4"),
        ("top_ids", "<i4", (MAX_ALTERNATIVES,)),
        ("top_logprobs", "<f4", (MAX_ALTERNATIVES,)),
        ("checksum", "<u4"),  # of the record itself, when it is checked
        ("reserved", "V52"),  # up to whole cache lines
        ("seal", "<u8"),  # of all that stands in the slot, and what it is for; 0: whoever wrote it tells otherwise
    ]
)
CHECKSUM: Final = np.dtype("<u4")
CACHE_LINE: Final = 64  # bytes
SLOTS: Final = 1024
DAMAGED_AFTER_S: Final = 1.0  # that a seal which does not fit has stood: longer than a slot is written


def slot_bytes(max_checksums: int) -> int:
    """Size of a slot that has room for so many: whole cache lines."""
    return HEAD.itemsize + -(-max_checksums * CHECKSUM.itemsize // CACHE_LINE) * CACHE_LINE


def room_for_checksums(num_bytes: int) -> int:
    """How many a slot of that size holds."""
    return (num_bytes - HEAD.itemsize) // CHECKSUM.itemsize


@dataclass(frozen=True, slots=True)
class AuxRecord:
    """What one slot says."""

    stamp: int
    num_pages: int
    first_token: int
    num_cached_tokens: int
    checksums: tuple[int, ...] | None = None  # of the pages that were sent, in order; None: nobody asked for them
    intact: bool = True  # when it has checksums: whether it is what was written
    logprobs: TokenLogprobs | None = None  # of the first token, with at most `MAX_ALTERNATIVES`


class AuxBuffer:
    """Slots in host memory, registered with the transfer backend like the pages."""

    def __init__(self, slots: int = SLOTS, max_checksums: int = 0) -> None:
        self._memory = np.zeros((slots, slot_bytes(max_checksums)), dtype=np.uint8)
        self._heads = self._memory[:, : HEAD.itemsize].view(HEAD)[:, 0]
        self._checksums = self._memory[:, HEAD.itemsize :].view(CHECKSUM)
        self._seals = self._heads["seal"]
        self._free = deque(range(slots))  # the longest free is taken first: a late write finds its slot nobody's yet
        self._is_taken = bytearray(slots)
        self._useless: dict[int, tuple[int, float]] = {}  # seals that did not fit, and since when

    @property
    def address(self) -> int:
        """Of slot 0."""
        return int(self._memory.ctypes.data)

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return len(self._memory)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot, and the distance to the next one."""
        return int(self._memory.shape[1])

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return int(self._memory.nbytes)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A cleared slot. Raises: QueueFull, when none is free."""
        if not self._free:
            raise QueueFull(f"all {self.num_slots} aux slots are taken: too many transfers at once")
        slot = self._free.popleft()
        self._is_taken[slot] = True
        self._useless.pop(slot, None)
        self._memory[slot, : HEAD.itemsize] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """No transfer touches the slot any more."""
        assert self._is_taken[slot], f"aux slot {slot} is free already"
        self._is_taken[slot] = False
        self._free.append(slot)

    def write(self, slot: int, record: AuxRecord) -> None:
        """Fill a slot on the sending side; the record has no more checksums than there is room for."""
        head = self._heads[slot]
        head["stamp"] = record.stamp
        head["num_pages"] = record.num_pages
        head["first_token"] = record.first_token
        head["num_cached_tokens"] = record.num_cached_tokens
        _write_logprobs(head, record.logprobs)
        head["checked"] = head["checksum"] = 0
        if record.checksums is not None:
            head["checked"] = 1 + len(record.checksums)
            self._checksums[slot, : len(record.checksums)] = record.checksums
            head["checksum"] = self._sum(slot, len(record.checksums))

    def read(self, slot: int) -> AuxRecord:
        """What stands in a slot on the receiving side."""
        head = self._heads[slot]
        count = int(head["checked"]) - 1
        return AuxRecord(
            stamp=int(head["stamp"]),
            num_pages=int(head["num_pages"]),
            first_token=int(head["first_token"]),
            num_cached_tokens=int(head["num_cached_tokens"]),
            checksums=None if count < 0 else tuple(self._checksums[slot, :count].tolist()),
            intact=count < 0 or int(head["checksum"]) == self._sum(slot, count),
            logprobs=_read_logprobs(head),
        )

    def seal(self, slot: int, notification: str) -> None:
        """What stands in the slot is for whoever expects `notification`, who may look at the slot instead of being told."""
        self._seals[slot] = self._seal(slot, notification)

    def is_sealed(self, slot: int, notification: str) -> bool:
        """Whether what was sealed for `notification` has arrived in the slot, and not in part."""
        found = self._seals[slot]
        return bool(found and found == self._seal(slot, notification))

    def is_damaged(self, slot: int, now_s: float) -> bool:
        """Whether the slot has a seal that is of no use and stays as it is, so that what was sealed will not come any more.

        Asked again and again while nothing that was expected there has arrived; `now_s` is of a clock that does not go back.
        """
        seal = int(self._seals[slot])
        if not seal:
            return False
        known, since_s = self._useless.setdefault(slot, (seal, now_s))
        if known != seal:
            self._useless[slot] = seal, now_s
        return known == seal and now_s - since_s > DAMAGED_AFTER_S

    def has_checksums(self, slot: int) -> bool:
        """Whether what stands in the slot is longer than a head."""
        return bool(self._heads["checked"][slot])

    def _seal(self, slot: int, notification: str) -> int:
        head = self._memory[slot, : HEAD.fields["seal"][1]]  # type: ignore[index]
        count = max(0, int(self._heads["checked"][slot]) - 1)
        sums = self._checksums[slot, :count]
        digest = blake2b(head.data, digest_size=8)
        digest.update(sums.data)
        digest.update(notification.encode())
        return int.from_bytes(digest.digest(), "little") | 1  # never 0

    def raw(self, slot: int) -> bytes:
        """A slot as it lies in memory, as far as its record goes: room for checksums that are not there is left out."""
        num_checksums = max(0, int(self._heads[slot]["checked"]) - 1)
        raw: bytes = self._memory[slot, : HEAD.itemsize + num_checksums * CHECKSUM.itemsize].tobytes()
        return raw

    def put(self, slot: int, raw: bytes) -> None:
        """Fill a slot with what `raw` gave elsewhere, as far as there is room. Raises: MalformedMessage."""
        if not (0 <= slot < self.num_slots and len(raw) >= HEAD.itemsize):
            raise MalformedMessage(f"{len(raw)} bytes for aux slot {slot} of {self.num_slots}")
        size = min(len(raw), self.slot_bytes)
        self._memory[slot, :size] = np.frombuffer(raw, dtype=np.uint8)[:size]

    def _sum(self, slot: int, count: int) -> int:
        """Checksum of a slot's record, which has `count` checksums of pages."""
        before = HEAD.fields["checksum"][1]  # type: ignore[index]
        return crc32(self._checksums[slot, :count].data, crc32(self._memory[slot, :before].data))


def _write_logprobs(head: np.void, logprobs: TokenLogprobs | None) -> None:
    head["told"] = 0
    if logprobs is not None:
        count = len(logprobs.top)
        head["told"], head["logprob"] = 1 + count, logprobs.logprob
        head["top_ids"][:count] = [token_id for token_id, _ in logprobs.top]
        head["top_logprobs"][:count] = [logprob for _, logprob in logprobs.top]


def _read_logprobs(head: np.void) -> TokenLogprobs | None:
    count = int(head["told"]) - 1
    if count < 0:
        return None
    top = zip(head["top_ids"][:count].tolist(), head["top_logprobs"][:count].tolist(), strict=True)
    return TokenLogprobs(float(head["logprob"]), tuple(top))
