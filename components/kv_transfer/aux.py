"""Aux slots. Prefill writes a record after the last page, so its arrival means that all pages have arrived."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from zlib import crc32

import numpy as np

from components.aio import exception_of
from components.errors import KvCorrupt, MalformedMessage, QueueFull
from components.kv_transfer.own_thread import OwnThread
from components.wire.logprobs import TokenLogprobs

MAX_ALTERNATIVES: Final = 20  # OpenAI's limit on `top_logprobs`
HEAD: Final = np.dtype(
    [
        ("stamp", "<u8"),  # of the transfer; 0: no record yet
        ("num_pages", "<u4"),  # of decode's page size
        ("first_token", "<i4"),
        ("num_cached_tokens", "<u4"),  # prefix hit on prefill
        ("checked", "<u4"),  # 1 + number of checksums; 0: not requested
        ("alternatives", "<u4"),  # 1 + number of alternatives; 0: no log-probabilities
        ("logprob", "<f4"),
        ("top_ids", "<i4", (MAX_ALTERNATIVES,)),
        ("top_logprobs", "<f4", (MAX_ALTERNATIVES,)),
        ("checksum", "<u4"),  # of the record
        ("reserved", "V52"),  # pads to whole cache lines
        ("seal", "<u8"),  # hash of record and notification; 0: not polled
    ]
)
CHECKSUM: Final = np.dtype("<u4")
CACHE_LINE: Final = 64  # bytes
SLOTS: Final = 1024
DAMAGED_AFTER_S: Final = 1.0  # longer than a write of a slot
POLL_COMING_S: Final = 0.0002
POLL_EXPECTED_S: Final = 0.005  # frequent polls slow down prefill
LINGER_POLLS: Final = 200  # after an arrival, as its writer may still need progress on our side
COMING_S: Final = 1.0


def slot_bytes(max_checksums: int) -> int:
    return HEAD.itemsize + -(-max_checksums * CHECKSUM.itemsize // CACHE_LINE) * CACHE_LINE


def room_for_checksums(num_bytes: int) -> int:
    return (num_bytes - HEAD.itemsize) // CHECKSUM.itemsize


@dataclass(frozen=True, slots=True)
class AuxRecord:
    stamp: int
    num_pages: int
    first_token: int
    num_cached_tokens: int
    checksums: tuple[int, ...] | None = None  # of the sent pages, in order
    intact: bool = True  # False: the record's own checksum is wrong
    logprobs: TokenLogprobs | None = None


class AuxBuffer:
    def __init__(self, slots: int = SLOTS, max_checksums: int = 0) -> None:
        self._memory = np.zeros((slots, slot_bytes(max_checksums)), dtype=np.uint8)
        self._heads = self._memory[:, : HEAD.itemsize].view(HEAD)[:, 0]
        self._checksums = self._memory[:, HEAD.itemsize :].view(CHECKSUM)
        self._seals = self._heads["seal"]
        self._free = deque(range(slots))  # oldest first, so late writes hit unused slots
        self._is_taken = bytearray(slots)
        self._wrong_seals: dict[int, tuple[int, float]] = {}  # seal and time first seen, by slot

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    @property
    def num_slots(self) -> int:
        return len(self._memory)

    @property
    def slot_bytes(self) -> int:
        return int(self._memory.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self._memory.nbytes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise QueueFull(f"all {self.num_slots} aux slots are in use: too many concurrent transfers")
        slot = self._free.popleft()
        self._is_taken[slot] = True
        self._wrong_seals.pop(slot, None)
        self._memory[slot, : HEAD.itemsize] = 0
        return slot

    def give_back(self, slot: int) -> None:
        assert self._is_taken[slot], f"aux slot {slot} is free already"
        self._is_taken[slot] = False
        self._free.append(slot)

    def write(self, slot: int, record: AuxRecord) -> None:  # the slot must have room for the checksums
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
        """Mark the record as complete, for a receiver that polls for `notification`."""
        self._seals[slot] = self._seal(slot, notification)

    def is_sealed(self, slot: int, notification: str) -> bool:
        found = self._seals[slot]
        return bool(found and found == self._seal(slot, notification))

    def is_damaged(self, slot: int, now_s: float) -> bool:
        """Return whether a wrong seal has been there for DAMAGED_AFTER_S of repeated calls. `now_s` is monotonic."""
        seal = int(self._seals[slot])
        if not seal:
            return False
        known, since_s = self._wrong_seals.setdefault(slot, (seal, now_s))
        if known != seal:
            self._wrong_seals[slot] = seal, now_s
        return known == seal and now_s - since_s > DAMAGED_AFTER_S

    def has_checksums(self, slot: int) -> bool:
        return bool(self._heads["checked"][slot])

    def _seal(self, slot: int, notification: str) -> int:
        head = self._memory[slot, : HEAD.fields["seal"][1]]  # type: ignore[index]
        count = max(0, int(self._heads["checked"][slot]) - 1)
        sums = self._checksums[slot, :count]
        digest = blake2b(head.data, digest_size=8)
        digest.update(sums.data)
        digest.update(notification.encode())
        return int.from_bytes(digest.digest(), "little") | 1  # 0 would mean no seal

    def raw(self, slot: int) -> bytes:
        num_checksums = max(0, int(self._heads[slot]["checked"]) - 1)
        raw: bytes = self._memory[slot, : HEAD.itemsize + num_checksums * CHECKSUM.itemsize].tobytes()
        return raw

    def put(self, slot: int, raw: bytes) -> None:
        if not (0 <= slot < self.num_slots and len(raw) >= HEAD.itemsize):
            raise MalformedMessage(f"{len(raw)} bytes for aux slot {slot} of {self.num_slots}")
        size = min(len(raw), self.slot_bytes)
        self._memory[slot, :size] = np.frombuffer(raw, dtype=np.uint8)[:size]

    def _sum(self, slot: int, count: int) -> int:
        before = HEAD.fields["checksum"][1]  # type: ignore[index]
        return crc32(self._checksums[slot, :count].data, crc32(self._memory[slot, :before].data))


def _write_logprobs(head: np.void, logprobs: TokenLogprobs | None) -> None:
    head["alternatives"] = 0
    if logprobs is not None:
        count = len(logprobs.top)
        head["alternatives"], head["logprob"] = 1 + count, logprobs.logprob
        head["top_ids"][:count] = [token_id for token_id, _ in logprobs.top]
        head["top_logprobs"][:count] = [logprob for _, logprob in logprobs.top]


def _read_logprobs(head: np.void) -> TokenLogprobs | None:
    count = int(head["alternatives"]) - 1
    if count < 0:
        return None
    top = zip(head["top_ids"][:count].tolist(), head["top_logprobs"][:count].tolist(), strict=True)
    return TokenLogprobs(float(head["logprob"]), tuple(top))


class AuxArrivals:
    """Polls aux slots for complete records. Event loop and thread share state by atomic operations only."""

    def __init__(self, aux: AuxBuffer, thread: OwnThread) -> None:
        self._aux = aux
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, tuple[int, asyncio.Future[None]]] = {}  # slot by notification
        self._coming: dict[str, float] = {}  # polled often until this time, by notification
        self._poll_all_s = 0.0  # next poll of the others
        self._linger = 0  # polls left while no slot is expected

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._expected[notification] = slot, future
        future.add_done_callback(lambda done: self._forget(notification, done))
        if len(self._expected) == 1:  # otherwise the thread is already polling
            self._thread.wake()
        return future

    def poll_often(self, notification: str) -> None:
        """Complete the slot if its record has arrived, else poll often."""
        if notification in self._expected and not self._poll_slot(notification):
            is_polling = self._polls_often()
            self._coming[notification] = time.monotonic() + COMING_S
            if not is_polling:
                self._thread.wake()

    def poll_interval_s(self) -> float | None:
        if not self._expected and not self._linger:
            return None
        return POLL_COMING_S if self._polls_often() else POLL_EXPECTED_S

    def begin_poll(self) -> bool:
        """Return whether to make progress for peers. Counts down the extra polls after an arrival."""
        if self._expected:
            return True
        lingers = self._linger > 0
        self._linger -= lingers
        return lingers

    def poll(self) -> None:
        """Poll announced slots, and sometimes all, because an announcement may be lost."""
        now_s = time.monotonic()
        if now_s < self._poll_all_s:
            for notification in list(self._coming):
                self._poll_slot(notification)
            return
        self._poll_all_s = now_s + POLL_EXPECTED_S
        for notification in list(self._expected):
            # before the announcement, a wrong seal belongs to another transfer
            if not self._poll_slot(notification) and notification in self._coming:
                self._check_damage(notification, now_s)

    def _polls_often(self) -> bool:
        if not self._coming:
            return False
        now_s = time.monotonic()
        return any(until_s > now_s for until_s in self._coming.copy().values())

    def _poll_slot(self, notification: str) -> bool:
        """Runs on either thread."""
        slot, future = self._expected.get(notification, (0, None))
        if future is None or not self._aux.is_sealed(slot, notification):
            return False
        self._linger = LINGER_POLLS
        self._expected.pop(notification, None)
        self._thread.settle(future)
        return True

    def _check_damage(self, notification: str, now_s: float) -> None:
        slot, future = self._expected.get(notification, (0, None))
        if future is not None and self._aux.is_damaged(slot, now_s):
            self._linger = LINGER_POLLS
            self._thread.settle(future, error=KvCorrupt("the aux slot was corrupted on its way from prefill"))

    def _forget(self, notification: str, future: asyncio.Future[None]) -> None:
        _, present = self._expected.get(notification, (0, None))
        if present is None or present is future:  # otherwise it was cancelled and is expected again, in the same turn
            self._expected.pop(notification, None)
            self._coming.pop(notification, None)
        exception_of(future)  # or asyncio logs it if the caller has gone
