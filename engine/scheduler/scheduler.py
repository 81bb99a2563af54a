"""Plan a step: running decodes first, then prompt chunks by priority, from one token budget.

Lower priorities go first, as in vLLM. Within a priority, pages are given in order of arrival: prefill and decode
each hold pages until the other is ready, so they must agree on the order. Among requests with pages, short prompts
overtake long ones, also between two chunks, so a long prompt delays others by a step at most. Bounds on overtaking
(`components/turns.py`) prevent starvation. A running request keeps its place; when pages run out, the youngest of
the worst priority is preempted and computed again later.
"""

import logging
from bisect import insort
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Final

import msgspec

from components.turns import turn
from engine.ports import Phase
from engine.scheduler.memory import RequestMemory
from engine.scheduler.request import Request, RequestState

log = logging.getLogger(__name__)

RUNNING: Final = RequestState.RUNNING  # attributes of an enum are slow, and each chunk needs them
PASSED: Final = 64  # queued prompts that a request which needs only pages may overtake

by_rank = attrgetter("priority", "arrival")  # the last is preempted first


def by_turn(request: Request) -> tuple[int, int]:
    """Order of computing; preempted and moved requests do not wait again."""
    fresh = not (request.has_begun or request.num_generated or request.branch)
    return turn(request.arrival, request.priority, request.prompt_len if fresh else 0)


def in_line(request: Request) -> tuple[int, int]:
    return turn(request.arrival, request.priority, 0)


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A request's part of a step: tokens `start` to `end`. A msgspec struct, as `TokenOutput`."""

    request: Request
    start: int
    end: int  # tokens with KV once it is computed
    samples: bool  # it includes the last token, so the next one is drawn
    ahead: bool  # that last token is still being drawn by the step before

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def dropped(self) -> bool:
        """Whether its request ended after the launch: the draw is ignored."""
        return self.request.lifecycle.state is not RUNNING


class Plan(msgspec.Struct, frozen=True, eq=False):
    chunks: list[Chunk]
    reserved: list[Request]  # DECODE requests that got their pages


class Scheduler:
    def __init__(self, memory: RequestMemory, max_running: int, max_step_tokens: int, pack_tokens: int) -> None:
        """`pack_tokens`: prompt tokens from which a step takes no further prompt."""
        self.memory = memory
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reserved: list[Request] = []
        self.retractions = 0
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._pack_tokens = pack_tokens
        self._made_room = False  # the latest plan preempted a request
        self._decodes_wait = False  # a DECODE may be in line

    def add(self, request: Request) -> None:
        self._decodes_wait |= request.phase is Phase.DECODE
        insort(self.waiting, request, key=in_line)

    def start(self, request: Request) -> None:
        self.reserved.remove(request)
        request.advance(RequestState.RUNNING)
        insort(self.running, request, key=by_rank)

    def fork(self, request: Request, branch: Request) -> list[tuple[int, int]]:
        """A branch of a running request, whose prompt is computed, joins the batch, or waits if there is no room.

        Returns: (source, target) pages to copy; none if it waits, to find the prompt in the cache.
        """
        if not self._has_place(branch):
            self.add(branch)
            return []
        pages = self.memory.fork(request, branch)
        branch.advance(RequestState.RUNNING)
        insort(self.running, branch, key=by_rank)
        return pages

    def remove(self, request: Request) -> None:
        """The request ends; its state is still the one before."""
        lists = {
            RequestState.WAITING: self.waiting,
            RequestState.RUNNING: self.running,
            RequestState.RESERVED: self.reserved,
        }
        lists[request.state].remove(request)

    def has_work(self) -> bool:
        """Whether `schedule` would give a step anything to do."""
        return bool(self.running) or self._can_admit()

    def computes(self) -> bool:
        return bool(self.running) or self._admits_prompt()

    def has_prompts(self) -> bool:
        return self._admits_prompt() or any(r.upcoming[1] > 1 for r in self.running)

    def _admits_prompt(self) -> bool:
        return self._can_admit() and any(request.phase is not Phase.DECODE for request in self.waiting)

    def must_retract(self) -> bool:
        available = self.memory.pool.num_available
        if available >= len(self.running):  # a page each: the common case
            return False
        decodes = ((len(r.pages) * self.memory.page_size, *r.upcoming) for r in self.running)
        return sum(1 for slots, start, pending in decodes if pending == 1 and start >= slots) > available

    def schedule(self, beside: int | None = None) -> Plan:
        """Plan one step and give its requests their pages.

        One step may be in flight with unknown tokens, but none if a request must be preempted.

        Args:
            beside: prompt tokens that a step with decodes may compute; None: up to the budget.
        """
        budget = self._max_step_tokens
        retractions, page_size = self.retractions, self.memory.page_size
        chunks: list[Chunk] = []
        for request in list(self.running):  # the last of them may be preempted
            start, pending = request.upcoming
            if pending != 1 or (self.retractions > retractions and request.state is not RequestState.RUNNING):
                continue
            if start < len(request.pages) * page_size or self._make_room(request, start + 1):
                chunks.append(Chunk(request, start, start + 1, True, start == len(request.tokens)))
        budget -= len(chunks)
        if chunks and beside is not None:
            budget = min(budget, beside)
        full = max(0, budget - self._pack_tokens)  # with at most this budget left, no further prompt is begun
        prompts = [r for r in self.running if r.upcoming[1] > 1] if len(chunks) < len(self.running) else []
        prompts.sort(key=by_turn, reverse=True)
        self._made_room = self.retractions > retractions
        reserved = self.reserve()
        while (following := self._next(prompts, admit=not self._made_room, more=budget > full)) is not None:
            start, pending = following.upcoming
            length = chunk_length(pending, budget)
            if not length:
                break
            end = start + length
            chunks.append(Chunk(following, start, end, length == pending, end > len(following.tokens)))
            budget -= length
        return Plan(chunks, reserved)

    def reserve(self) -> list[Request]:
        """Give pages to requests that need no more, also during a step.

        They overtake queued prompts if pages remain for all of them: the prefills of those requests hold pages
        until they have theirs.
        """
        reserved: list[Request] = []
        while not self._made_room and (at := self._first_decode()) is not None:
            reserved.append(self._admit(at))
        return reserved

    def _first_decode(self) -> int | None:
        """Place in line of the first DECODE, if there is room for it and all before it."""
        if not self._decodes_wait:
            return None
        at = next((i for i, r in enumerate(self.waiting[: PASSED + 1]) if r.phase is Phase.DECODE), None)
        if at is None:
            self._decodes_wait = len(self.waiting) > PASSED
            return None
        return at if self._has_place(self.waiting[at], self.waiting[:at]) else None

    def _next(self, prompts: list[Request], *, admit: bool, more: bool) -> Request | None:
        """The next prompt: one of the running `prompts`, whose first is last in the list, or one from the line.

        `admit`: false after a preemption, whose request would be next. `more`: there is budget. While a waiting
        request comes before all `prompts`, those in line up to it get pages and become prompts.
        """
        while admit and self._takes_first(prompts, more=more) and self._can_admit():
            prompts.append(self._admit())
            prompts.sort(key=by_turn, reverse=True)
        return prompts.pop() if prompts and more else None

    def _takes_first(self, prompts: list[Request], *, more: bool) -> bool:
        if not self.waiting or self.waiting[0].phase is Phase.DECODE:  # it waits for pages, and is not overtaken
            return False
        if not more or not prompts:
            return more
        first = by_turn(prompts[-1])
        soon = takewhile(lambda request: in_line(request) <= first, self.waiting)  # later ones cannot come before it
        return any(by_turn(request) < first for request in soon)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self._has_place(self.waiting[0])

    def _has_place(self, request: Request, before: Sequence[Request] = ()) -> bool:
        """Whether `request` may join the batch now, and those `before` it later."""
        if len(self.running) + len(self.reserved) + len(before) >= self._max_running:
            return False
        return self.memory.fits(request, [*self.running, *self.reserved], before)

    def _admit(self, at: int = 0) -> Request:
        request = self.waiting.pop(at)
        self.memory.admit(request)
        if request.phase is Phase.DECODE:
            request.advance(RequestState.RESERVED)
            insort(self.reserved, request, key=by_rank)
        else:
            request.advance(RequestState.RUNNING)
            insort(self.running, request, key=by_rank)
        return request

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a decode slots for so many tokens, preempting the last in rank if needed. False: it was the last.

        A PREFILL request is never preempted: its pages are being read, and it needs no more.
        """
        while not self.memory.grow(request, num_tokens):
            last = next(r for r in reversed(self.running) if r.phase is not Phase.PREFILL)
            self._retract(last)
            if last is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        """Preempt a request: it loses its pages and is computed again later."""
        assert request.in_flight is None, "pages that are being written would be given away"
        log.info("request retracted", extra={"request_id": request.id, "tokens": len(request.tokens)})
        self.running.remove(request)
        self.memory.give_back(request)
        request.advance(RequestState.WAITING)
        self.add(request)
        self.retractions += 1


def chunk_length(pending: int, budget: int) -> int:
    """Tokens of a prompt with `pending` left that a step with `budget` left computes; 0: none.

    Never one of several, and never all but one: a matrix product with one row takes another path and has other last
    bits. Chunks depend on other requests, and logits must not.
    """
    if pending <= budget:
        return pending
    length = budget - 1 if pending == budget + 1 else budget
    return length if length > 1 else 0
