"""A queue of requests that is fair to API keys and bounded in tokens. No clock and no I/O.

Priorities are merged by the engines' rule (`engine/ports.py`), applied to the first request of each. Within a priority,
keys share by start-time fair queueing in tokens: a key's next request starts, in virtual time, where its last one ended, but
not before now, and the earliest start goes first. Tokens of answers are charged when they are known.
Sources: Goyal, Vin, Cheng 1996, "Start-time fair queuing"; Sheng et al. 2023, arXiv:2401.00588 (virtual token counter).

When the queue is full, requests of worse priorities than the newcomer's are dropped first. Then, within its priority, the key
with most tokens loses its youngest requests, if it has more than the newcomer's key would have. Else the newcomer is refused.
Source: Suter, Lakshman, Stiliadis, Choudhury 1998 (longest queue drop).
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final

from components.errors import Overloaded
from engine.ports import turn

SWEEP_AT: Final = 64  # stale entries that a heap or a dict may hold


@dataclass(slots=True, eq=False)
class AdmissionTicket:
    """A request from `Admission.enter` to `leave`."""

    key: bytes
    priority: int  # lower is served first
    tokens: int
    since_s: float
    choices_not_started: int = 1  # choices without a token
    arrival: int = -1  # set by the queue
    is_admitted: bool = False  # admitted and not ended
    admission_result: asyncio.Future[Overloaded | None] | None = None  # of a queued request; None: admitted
    tokens_not_started: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_not_started = self.tokens

    @property
    def order(self) -> tuple[int, int]:
        return turn(self.arrival, self.priority, self.tokens)

    async def admitted(self) -> None:
        """Wait until the request is admitted. Raises: QueueFull, NoDecodeInstance."""
        if self.admission_result is not None and (refusal := await self.admission_result) is not None:
            raise refusal


ByArrival = OrderedDict[int, AdmissionTicket]  # by arrival


class _Line:
    __slots__ = ("_turns", "listed", "start", "tokens", "waiting", "weighed")

    def __init__(self) -> None:
        self._turns: list[tuple[int, int]] = []  # heap; may hold requests that have left the queue
        self.listed = False  # in `_Order`
        self.weighed = 0  # tokens by its latest entry in `_Heaviest`; never less than `tokens`
        self.start = 0  # of its next request, in virtual time
        self.tokens = 0
        self.waiting: ByArrival = OrderedDict()

    def rank(self) -> tuple[int, int]:
        return self.start, next(iter(self.waiting))

    def add(self, request: AdmissionTicket) -> None:
        self.waiting[request.arrival] = request
        heappush(self._turns, request.order)
        if len(self._turns) > 2 * len(self.waiting) + SWEEP_AT:
            self._turns = [request.order for request in self.waiting.values()]
            heapify(self._turns)

    def first(self) -> AdmissionTicket:
        while self._turns[0][1] not in self.waiting:
            heappop(self._turns)
        return self.waiting[self._turns[0][1]]


class _Order:
    """Lines by rank. Ranks only grow, so a stale entry is corrected when it reaches the top of the heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], _Line]] = []
        self._sweep_at = SWEEP_AT

    def add(self, line: _Line) -> None:
        if line.listed:
            return
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        line.listed = True
        heappush(self._heap, (line.rank(), line))

    def first(self) -> _Line:
        """Return the line with the lowest rank. There must be one."""
        while True:
            rank, line = self._heap[0]
            if not line.waiting:
                heappop(self._heap)
                line.listed = False
            elif (now := line.rank()) != rank:
                heapreplace(self._heap, (now, line))
            else:
                return line

    def _sweep(self) -> None:
        for _, line in self._heap:
            line.listed = bool(line.waiting)
        self._heap = [entry for entry in self._heap if entry[1].listed]
        heapify(self._heap)
        self._sweep_at = 2 * len(self._heap) + SWEEP_AT


class _Heaviest:
    """Finds the line with the most tokens. A line that grew is pushed again; one that shrank is corrected at the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Line]] = []
        self._sweep_at = SWEEP_AT
        self._numbers = count()  # tie-breaker, so that no two entries are equal

    def line_grew(self, line: _Line) -> None:
        if line.tokens <= line.weighed:
            return
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        line.weighed = line.tokens
        heappush(self._heap, (-line.tokens, next(self._numbers), line))

    def line(self) -> _Line:
        while True:
            weight, _, line = self._heap[0]
            if -weight != line.weighed:  # stale: the line has another entry
                heappop(self._heap)
            elif line.tokens == line.weighed:
                return line
            else:
                line.weighed = line.tokens
                heapreplace(self._heap, (-line.tokens, next(self._numbers), line))

    def _sweep(self) -> None:
        kept: dict[int, tuple[int, int, _Line]] = {}  # one entry for each line
        for entry in self._heap:
            weight, _, line = entry
            if -weight != line.weighed:
                continue
            if line.tokens:
                kept[id(line)] = entry
            else:
                line.weighed = 0
        self._heap = list(kept.values())
        heapify(self._heap)
        self._sweep_at = 2 * len(kept) + SWEEP_AT


class _Level:
    __slots__ = ("_heaviest", "_lines", "_now", "_order", "_priority", "_sweep_at", "num_waiting", "tokens")

    def __init__(self, priority: int) -> None:
        self.num_waiting = 0
        self.tokens = 0
        self._priority = priority
        self._now = 0  # virtual time: the start of the request that was taken last
        self._lines: dict[bytes, _Line] = {}
        self._order = _Order()
        self._heaviest = _Heaviest()
        self._sweep_at = SWEEP_AT

    def turn(self) -> tuple[int, int]:
        return self._order.first().first().order[0], self._priority

    def add(self, request: AdmissionTicket) -> None:
        line = self._line(request.key)
        if not line.waiting:
            line.start = max(line.start, self._now)
        line.add(request)
        self.num_waiting += 1
        line.tokens += request.tokens
        self.tokens += request.tokens
        self._order.add(line)
        self._heaviest.line_grew(line)

    def remove(self, request: AdmissionTicket) -> None:
        line = self._lines[request.key]
        del line.waiting[request.arrival]
        self.num_waiting -= 1
        line.tokens -= request.tokens
        self.tokens -= request.tokens

    def take(self) -> AdmissionTicket:
        line = self._order.first()
        request = line.first()
        self._now = line.start
        line.start += request.tokens
        self.remove(request)
        return request

    def charge(self, key: bytes, tokens: int) -> None:
        line = self._line(key)
        line.start = max(line.start, self._now) + tokens

    def worst(self) -> AdmissionTicket:
        return next(reversed(self._heaviest.line().waiting.values()))

    def requests_to_drop(self, newcomer: AdmissionTicket, excess: int) -> list[AdmissionTicket] | None:
        """Return requests of the heaviest key to drop for `newcomer`, at least `excess` tokens; None: refuse the newcomer."""
        mine = self._lines.get(newcomer.key)
        share = newcomer.tokens + (0 if mine is None else mine.tokens)
        heaviest = self._heaviest.line()
        left = heaviest.tokens
        found: list[AdmissionTicket] = []
        for request in reversed(heaviest.waiting.values()):
            if left <= share:
                return None
            found.append(request)
            left -= request.tokens
            excess -= request.tokens
            if excess <= 0:
                return found
        return None

    def _line(self, key: bytes) -> _Line:
        """Return a key's line. It outlives its requests until virtual time has reached its start."""
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= self._sweep_at:
                self._lines = {k: li for k, li in self._lines.items() if li.waiting or li.start > self._now}
                self._sweep_at = 2 * len(self._lines) + SWEEP_AT
            line = self._lines[key] = _Line()
        return line


class FairQueue:
    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._arrivals = 0
        self._waiting: ByArrival = OrderedDict()
        self._levels: dict[int, _Level] = {}  # of priorities that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: AdmissionTicket) -> bool:
        return request.arrival in self._waiting

    def put(self, request: AdmissionTicket) -> list[AdmissionTicket]:
        """Queue a request, unless it is refused. A request larger than the queue may wait if it is alone.

        Returns: the requests that were dropped, which are no longer in the queue: `[request]` if it was refused.
        """
        leaving = self._make_room(request)
        if leaving is None:
            return [request]
        request.arrival = self._arrivals
        self._arrivals += 1
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level(request.priority)
        level.add(request)
        self._waiting[request.arrival] = request
        self.tokens += request.tokens
        return leaving

    def take(self) -> AdmissionTicket:
        """Remove and return the next request. There must be one."""
        request = min(self._levels.values(), key=_Level.turn).take()
        self._forget(request)
        return request

    def remove(self, request: AdmissionTicket) -> None:
        """Remove a request, which must be in the queue."""
        self._levels[request.priority].remove(request)
        self._forget(request)

    @property
    def oldest_since_s(self) -> float | None:
        """Return when the oldest queued request arrived; None if the queue is empty."""
        return next((request.since_s for request in self._waiting.values()), None)

    def waiting_since(self, until_s: float) -> list[AdmissionTicket]:
        """Requests that arrived up to `until_s`, the oldest first."""
        found: list[AdmissionTicket] = []
        for request in self._waiting.values():
            if request.since_s > until_s:
                break
            found.append(request)
        return found

    def charge(self, key: bytes, priority: int, tokens: int) -> None:
        """Charge a key for an answer. Ignored if no request of that priority is queued."""
        level = self._levels.get(priority)
        if level is not None:
            level.charge(key, tokens)

    def _make_room(self, newcomer: AdmissionTicket) -> list[AdmissionTicket] | None:
        """Drop requests to make room for `newcomer`, and return them; None: refuse it instead."""
        excess = self.tokens + newcomer.tokens - self._max_tokens
        if excess <= 0 or not self._waiting:
            return []
        if newcomer.tokens > self._max_tokens:
            return None
        worse = [self._levels[p] for p in sorted(self._levels, reverse=True) if p > newcomer.priority]
        missing = excess - sum(level.tokens for level in worse)
        leaving: list[AdmissionTicket] = []
        if missing > 0:
            level = self._levels.get(newcomer.priority)
            dropped = None if level is None else level.requests_to_drop(newcomer, missing)
            if dropped is None:
                return None
            leaving = dropped
            for request in dropped:
                self.remove(request)
        for level in worse:
            while level.num_waiting and self.tokens + newcomer.tokens > self._max_tokens:
                leaving.append(level.worst())
                self.remove(leaving[-1])
        return leaving

    def _forget(self, request: AdmissionTicket) -> None:
        del self._waiting[request.arrival]
        self.tokens -= request.tokens
        if not self._levels[request.priority].num_waiting:
            del self._levels[request.priority]
