"""Who computes what in a step: running decodes first, then prompt chunks by priority, from one token budget.

Priority, as in vLLM: the lower number goes first, 0 is the default. Within one priority pages and places are given first
in, first out, so that nobody waits for what a later one holds: decode and prefill each hold pages until the other one is
ready, and must agree on who goes first. Of those who have pages a long prompt lets shorter ones pass, also between two of
its chunks: one of 60,000 tokens that is computed for seconds holds nobody up for longer than a step. Nobody starves
(`components/turns.py`): whoever needs only pages passes prompts that wait for budget as far as there is room for those, too,
and admission skips nobody else. A running request keeps its place: only when
pages run out does the youngest of the worst priority give its own up, to compute its tokens again later.
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

RUNNING: Final = RequestState.RUNNING  # an enum is slow to ask, and each chunk does
PASSED: Final = 64  # prompts in line, that those who need only pages may pass, at most

by_rank = attrgetter("priority", "arrival")  # the last is the first to be retracted


def by_turn(request: Request) -> tuple[int, int]:
    """When its prompt is computed. One that was retracted, or has moved here, is not to wait again."""
    fresh = not (request.has_begun or request.num_generated or request.branch)
    return turn(request.arrival, request.priority, request.prompt_len if fresh else 0)


def in_line(request: Request) -> tuple[int, int]:
    """When it is given pages."""
    return turn(request.arrival, request.priority, 0)


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """One request's share of a step: tokens `start` to `end`. A struct, for the reason of `TokenOutput`."""

    request: Request
    start: int
    end: int  # tokens whose KV stands once it is computed
    samples: bool  # it ends with the request's last token, so that the next one is drawn
    ahead: bool  # that last token is still being drawn, by the step before

    @property
    def length(self) -> int:
        """How many tokens are computed."""
        return self.end - self.start

    @property
    def dropped(self) -> bool:
        """Whether its request ended after the step was launched: nobody looks at what is drawn for it."""
        return self.request.lifecycle.state is not RUNNING


class Plan(msgspec.Struct, frozen=True, eq=False):
    """What `schedule` decided."""

    chunks: list[Chunk]
    reserved: list[Request]  # DECODE requests that have got their pages


class Scheduler:
    """Those who wait, as they stand in line, those who run or are reserved, in order of rank; who moves between them."""

    def __init__(self, memory: RequestMemory, max_running: int, max_step_tokens: int, pack_tokens: int) -> None:
        """`pack_tokens`: a step takes no further prompt when it has so many prompt tokens."""
        self.memory = memory
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reserved: list[Request] = []
        self.retractions = 0
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._pack_tokens = pack_tokens
        self._made_room = False  # the latest plan had to retract somebody
        self._decodes_wait = False  # a DECODE may be in line

    def add(self, request: Request) -> None:
        """Queue a WAITING request."""
        self._decodes_wait |= request.phase is Phase.DECODE
        insort(self.waiting, request, key=in_line)

    def start(self, request: Request) -> None:
        """A RESERVED request has its KV: it joins the batch."""
        self.reserved.remove(request)
        request.advance(RequestState.RUNNING)
        insort(self.running, request, key=by_rank)

    def fork(self, request: Request, branch: Request) -> list[tuple[int, int]]:
        """Let a branch of a running request, whose prompt is computed, join the batch, or wait when there is no room.

        Returns: pages to copy and where to; none when it waits, to find the prompt in the cache.
        """
        if not self._has_place(branch):
            self.add(branch)
            return []
        pages = self.memory.fork(request, branch)
        branch.advance(RequestState.RUNNING)
        insort(self.running, branch, key=by_rank)
        return pages

    def remove(self, request: Request) -> None:
        """Forget a request that ends; its state is still the one it ends in."""
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
        """Whether a step would compute anything: pages are reserved without."""
        return bool(self.running) or self._admits_prompt()

    def has_prompts(self) -> bool:
        """Whether a step would compute a prompt."""
        return self._admits_prompt() or any(r.upcoming[1] > 1 for r in self.running)

    def _admits_prompt(self) -> bool:
        return self._can_admit() and any(request.phase is not Phase.DECODE for request in self.waiting)

    def must_retract(self) -> bool:
        """Whether there are too few pages for the running decodes' next tokens."""
        available = self.memory.pool.num_available
        if available >= len(self.running):  # a page each: as good as always
            return False
        decodes = ((len(r.pages) * self.memory.page_size, *r.upcoming) for r in self.running)
        return sum(1 for slots, start, pending in decodes if pending == 1 and start >= slots) > available

    def schedule(self, beside: int | None = None) -> Plan:
        """Plan one step and give its requests the pages they need for it.

        One step may be in flight, and its tokens unknown; none when somebody must be retracted.

        Args:
            beside: prompt tokens that a step with decodes may compute; None: as many as the budget allows.
        """
        budget = self._max_step_tokens
        retractions, page_size = self.retractions, self.memory.page_size
        chunks: list[Chunk] = []
        for request in list(self.running):  # whoever is last of them may have to make room
            start, pending = request.upcoming
            if pending != 1 or (self.retractions > retractions and request.state is not RequestState.RUNNING):
                continue
            if start < len(request.pages) * page_size or self._make_room(request, start + 1):
                chunks.append(Chunk(request, start, start + 1, True, start == len(request.tokens)))
        budget -= len(chunks)
        if chunks and beside is not None:
            budget = min(budget, beside)
        full = max(0, budget - self._pack_tokens)  # with so much of the budget left, no further prompt is begun
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
        """Give pages to those that need no more, also while the step that was planned is under way.

        They pass prompts that wait to be computed, as far as there is room for those, too: their prefills hold pages until they
        have theirs.
        """
        reserved: list[Request] = []
        while not self._made_room and (at := self._first_decode()) is not None:
            reserved.append(self._admit(at))
        return reserved

    def _first_decode(self) -> int | None:
        """Where the first DECODE stands in line, if there is room for it and for everyone before it."""
        if not self._decodes_wait:
            return None
        at = next((i for i, r in enumerate(self.waiting[: PASSED + 1]) if r.phase is Phase.DECODE), None)
        if at is None:
            self._decodes_wait = len(self.waiting) > PASSED
            return None
        return at if self._has_place(self.waiting[at], self.waiting[:at]) else None

    def _next(self, prompts: list[Request], *, admit: bool, more: bool) -> Request | None:
        """Whose turn it is: one of the running `prompts`, the last of which comes first.

        `admit`: whoever was retracted in this step would be the next. `more`: there is budget for a prompt. As long as one
        who waits is before all `prompts` by turn, those in line up to it are given pages, and become prompts, too.
        """
        while admit and self._takes_first(prompts, more=more) and self._can_admit():
            prompts.append(self._admit())
            prompts.sort(key=by_turn, reverse=True)
        return prompts.pop() if prompts and more else None

    def _takes_first(self, prompts: list[Request], *, more: bool) -> bool:
        """Whether this step has a use for whoever is first in line."""
        if not self.waiting or self.waiting[0].phase is Phase.DECODE:  # which waits for pages, and nobody passes it
            return False
        if not more or not prompts:
            return more
        first = by_turn(prompts[-1])
        soon = takewhile(lambda request: in_line(request) <= first, self.waiting)  # the others cannot be before it
        return any(by_turn(request) < first for request in soon)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self._has_place(self.waiting[0])

    def _has_place(self, request: Request, before: Sequence[Request] = ()) -> bool:
        """Whether `request` may join the batch now, and those `before` it in line later."""
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
        """Give a decode slots for so many tokens, retracting the last in rank while there is no page. False: it was the last.

        A PREFILL request is never retracted: its pages are being read, and it needs no more than it has.
        """
        while not self.memory.grow(request, num_tokens):
            last = next(r for r in reversed(self.running) if r.phase is not Phase.PREFILL)
            self._retract(last)
            if last is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        """Take a request out of the batch and its pages with it; it comes back to compute its tokens again."""
        assert request.in_flight is None, "pages that are being written would be given away"
        log.info("request retracted", extra={"request_id": request.id, "tokens": len(request.tokens)})
        self.running.remove(request)
        self.memory.give_back(request)
        request.advance(RequestState.WAITING)
        self.add(request)
        self.retractions += 1


def chunk_length(pending: int, budget: int) -> int:
    """How many of the `pending` tokens of a prompt a step computes that has `budget` left for it; 0: none.

    Never one of several, and never all but one. A product of matrices with one row goes another way than one with more,
    on a CPU and on a GPU, and its last bits differ: where chunks end depends on other requests, the logits must not.
    """
    if pending <= budget:
        return pending
    length = budget - 1 if pending == budget + 1 else budget
    return length if length > 1 else 0
