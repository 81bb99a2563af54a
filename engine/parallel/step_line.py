"""A queue of messages in shared memory, from the leader to the followers: one ring buffer.

Only the leader writes `written`, and each follower its own `done`; both only grow. A message has a checksum, because
on some processors stores become visible to others in a different order.
"""

import mmap
import os
import select
import threading
from struct import Struct
from time import perf_counter, sleep
from typing import Final
from zlib import crc32

RING_BYTES: Final = 64 << 20  # enough for the longest step: 256 block tables of 262,144 tokens in pages of 16 are 21 MB
HEAD: Final = Struct("<II")  # length and checksum of a message
COUNTER: Final = Struct("<Q")
LINE_BYTES: Final = 64  # a cache line for each counter
FULL_LOOK_S: Final = 1e-4
WAKE_S: Final = 0.05  # longest sleep of a follower, because the leader may have missed that it sleeps


class LineBroken(Exception):
    """The message is too long for the line, or the followers have ended."""


class StepLine:
    """One end of the line. Both ends share the file descriptors `memory` and `wakers`, which followers inherit."""

    def __init__(self, size: int, memory: int, wakers: list[int], num_bytes: int = RING_BYTES) -> None:
        self.memory = memory
        self.wakers = wakers  # an eventfd for each follower
        self._size = size
        self._start = LINE_BYTES * (1 + 2 * (size - 1))  # counters: `written`; `done` and `asleep` of each follower
        self._num_bytes = num_bytes
        self._position = 0  # position of a follower's next message
        self._map = mmap.mmap(memory, self._start + num_bytes)

    @classmethod
    def make(cls, size: int, num_bytes: int = RING_BYTES) -> "StepLine":
        memory = os.memfd_create("kvmesh-steps")
        os.ftruncate(memory, LINE_BYTES * (1 + 2 * (size - 1)) + num_bytes)
        return cls(size, memory, [os.eventfd(0) for _ in range(size - 1)], num_bytes)

    def close(self) -> None:
        self._map.close()
        for descriptor in (self.memory, *self.wakers):
            os.close(descriptor)

    # The leader's end.

    def send(self, message: bytes, is_over: threading.Event) -> None:
        """Append a message, when there is room. Raises: LineBroken."""
        needed = HEAD.size + len(message)
        if needed > self._num_bytes:
            raise LineBroken(f"a step of {len(message)} bytes is too long for followers: at most {self._num_bytes}")
        written = self._counter(0)
        while written + needed - self._least_done() > self._num_bytes:
            if is_over.is_set():
                raise LineBroken("the followers have ended")
            sleep(FULL_LOOK_S)
        self._put(written, HEAD.pack(len(message), crc32(message)) + message)
        COUNTER.pack_into(self._map, 0, written + needed)
        for rank, waker in enumerate(self.wakers, 1):
            if self._map[self._asleep(rank)]:
                os.eventfd_write(waker, 1)

    def is_done(self) -> bool:
        return self._counter(0) == self._least_done()

    # A follower's end.

    def receive(self, rank: int, spin_s: float) -> bytes:
        """Wait for the next message: poll for `spin_s`, then sleep. The call reports the previous message as done."""
        read = self._position
        COUNTER.pack_into(self._map, self._done(rank), read)
        self._wait(rank, read, spin_s)
        while True:
            length, checksum = HEAD.unpack(self._get(read, HEAD.size))
            if HEAD.size + length <= self._num_bytes:
                message = self._get(read + HEAD.size, length)
                if crc32(message) == checksum:
                    break
        self._position = read + HEAD.size + length
        return message

    def _wait(self, rank: int, read: int, spin_s: float) -> None:
        until = perf_counter() + spin_s
        while self._counter(0) == read:
            if perf_counter() < until:
                continue
            self._map[self._asleep(rank)] = 1
            waker = self.wakers[rank - 1]
            if self._counter(0) == read and select.select([waker], [], [], WAKE_S)[0]:
                os.eventfd_read(waker)
            self._map[self._asleep(rank)] = 0

    def _least_done(self) -> int:
        return min(self._counter(self._done(rank)) for rank in range(1, self._size))

    def _done(self, rank: int) -> int:
        return LINE_BYTES * (2 * rank - 1)

    def _asleep(self, rank: int) -> int:
        return LINE_BYTES * 2 * rank

    def _counter(self, at: int) -> int:
        value: int = COUNTER.unpack_from(self._map, at)[0]
        return value

    def _put(self, position: int, data: bytes) -> None:
        at = position % self._num_bytes
        first = min(len(data), self._num_bytes - at)
        self._map[self._start + at : self._start + at + first] = data[:first]
        self._map[self._start : self._start + len(data) - first] = data[first:]

    def _get(self, position: int, length: int) -> bytes:
        at = position % self._num_bytes
        first = min(length, self._num_bytes - at)
        start = self._start
        return self._map[start + at : start + at + first] + self._map[start : start + length - first]
