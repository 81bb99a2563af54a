"""Plan steps: decodes first, then prompt chunks, from one token budget.

Requests get pages by arrival and priority: a step of priority is worth 256 arrivals (`engine/ports.py`). Prefill and
decode must agree on this order, because each holds pages for the other. Among requests with pages, short prompts overtake
long ones. Without free pages, the youngest request of the worst priority is preempted.
"""

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Final

from engine.ports import Phase, turn
from engine.scheduler.request import Chunk, Drafter, Request, RequestMemory, RequestState

log = logging.getLogger(__name__)

LOADED_BESIDE_DECODES: Final = 32  # pages that such a step may load from files, which takes milliseconds
ALL_PAGES: Final = 1 << 40
MAX_OVERTAKEN_PROMPTS: Final = 64  # by a DECODE request in the queue
MAX_LOGPROBS_CHUNK: Final = 1024  # tokens, because each has a row of logits, as wide as the vocabulary

by_rank = attrgetter("priority", "arrival")  # sort key; the last request is preempted first


def prompt_order(request: Request) -> tuple[int, int]:
    """Sort key of prompts to compute. Preempted and moved requests count as short, so they do not wait again."""
    fresh = not (request.has_begun or request.num_generated or request.branch)
    return turn(request.arrival, request.priority, request.prompt_len if fresh else 0)


def queue_order(request: Request) -> tuple[int, int]:
    return turn(request.arrival, request.priority, 0)


class Scheduler:
    def __init__(
        self, memory: RequestMemory, max_running: int, max_step_tokens: int, pack_tokens: int, draft_rows: int = 0
    ) -> None:
        """`pack_tokens`: prompt tokens after which a step starts no prompt. `draft_rows`: most decodes and drafts."""
        self.memory = memory
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reserved: list[Request] = []
        self.preemptions = 0
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._pack_tokens = pack_tokens
        self._draft_rows = min(draft_rows, max_step_tokens)
        self._preempted = False  # whether the latest plan preempted a request
        self._decodes_wait = False

    def add(self, request: Request) -> None:
        self._decodes_wait |= request.phase is Phase.DECODE
        insort(self.waiting, request, key=queue_order)

    def start(self, request: Request) -> None:
        self.reserved.remove(request)
        request.advance(RequestState.RUNNING)
        insort(self.running, request, key=by_rank)

    def fork(self, request: Request, branch: Request) -> None:
        """Start `branch` after the prompt. Without enough pages, queue it: the prompt will be cached."""
        if not self._has_room_for(branch):
            self.add(branch)
            return
        self.memory.fork(request, branch)
        branch.advance(RequestState.RUNNING)
        insort(self.running, branch, key=by_rank)

    def remove(self, request: Request) -> None:
        """Call it before the request's state changes."""
        lists = {
            RequestState.WAITING: self.waiting,
            RequestState.RUNNING: self.running,
            RequestState.RESERVED: self.reserved,
        }
        lists[request.state].remove(request)

    def has_work(self) -> bool:
        return bool(self.running) or self._can_admit()

    def computes(self) -> bool:
        return bool(self.running) or self._admits_prompt()

    def would_reserve(self) -> bool:
        return self._first_decode() is not None

    def has_prompts(self) -> bool:
        return self._admits_prompt() or any(r.upcoming[1] > 1 for r in self.running)

    def _admits_prompt(self) -> bool:
        return self._can_admit() and any(request.phase is not Phase.DECODE for request in self.waiting)

    def must_preempt(self) -> bool:
        available = self.memory.pool.num_available
        if available >= len(self.running):  # a page each
            return False
        decodes = ((len(r.pages) * self.memory.page_size, *r.upcoming) for r in self.running)
        return sum(1 for slots, start, pending in decodes if pending == 1 and start >= slots) > available

    def schedule(
        self,
        beside: Callable[[int, int], tuple[int, int]] | None = None,
        least_chance: Callable[[int, int, int], float] | None = None,
    ) -> tuple[list[Chunk], list[Request]]:
        """Plan one step. No step may be in flight if `must_preempt` is true.

        Args:
            beside: as `ChunkLimit.tokens`; None: only the budget limits prompts.
            least_chance: as `RowCost.least_chance`; None: all drafts are checked.
        Returns: what to compute, and the DECODE requests that got pages.
        """
        preemptions = self.preemptions
        chunks = self._decodes(least_chance)
        self._preempted = self.preemptions > preemptions
        budget = self._max_step_tokens - sum(chunk.length for chunk in chunks)
        completing = 0
        if chunks and beside is not None:
            disaggregated = sum(chunk.request.disaggregated for chunk in chunks)
            budget, completing = (min(budget, tokens) for tokens in beside(len(chunks), disaggregated))
        full = max(0, budget - self._pack_tokens)  # budget at which no further prompt starts
        prompts = [r for r in self.running if r.upcoming[1] > 1] if len(chunks) < len(self.running) else []
        prompts.sort(key=prompt_order, reverse=True)
        reserved = self.reserve()
        loadable = LOADED_BESIDE_DECODES if chunks else ALL_PAGES
        while (following := self._next(prompts, admit=not self._preempted, more=budget > full)) is not None:
            if following.may_load:
                loadable -= self.memory.load(following, loadable)
                if following.may_load:  # the next step loads more
                    continue
            start, pending = following.upcoming
            most = MAX_LOGPROBS_CHUNK if following.reads_logits else self._max_step_tokens
            if pending <= min(completing, most):
                budget = max(budget, pending)
            completing = 0
            length = chunk_length(pending, min(budget, most))
            if not length:
                break
            end = start + length
            chunks.append(Chunk(following, start, end, length == pending, end > len(following.tokens)))
            budget -= length
        return chunks, reserved

    def _decodes(self, least_chance: Callable[[int, int, int], float] | None) -> list[Chunk]:
        """Plan a token for each decode, and drafts if the step has no prompt."""
        preemptions, page_size = self.preemptions, self.memory.page_size
        chunks: list[Chunk] = []
        decodes = [(r, start) for r in self.running for start, pending in [r.upcoming] if pending == 1]
        # in a step with a prompt, a draft would take the time of a prompt token
        places = 0 if len(decodes) < len(self.running) or self._admits_prompt() else self._draft_rows - len(decodes)
        for handled, (request, start) in enumerate(decodes):
            if self.preemptions > preemptions and request.state is not RequestState.RUNNING:
                continue
            if start < len(request.pages) * page_size or self._make_room(request, start + 1):
                chunk = Chunk(request, start, start + 1, True, start == len(request.tokens))
                if places > 0 and request.drafter is not None and request.has_begun:  # branches fork after the prompt
                    share = -(-places // (len(decodes) - handled))  # later ones get what earlier ones leave
                    share = min(share, request.drafter.max_drafts)
                    rows = self._draft_rows - places
                    least = 0.0 if least_chance is None else least_chance(len(decodes), rows, share)
                    chunk = self._with_drafts(chunk, request.drafter, share, least)
                    places -= len(chunk.drafts)
                chunks.append(chunk)
        return chunks

    def _with_drafts(self, chunk: Chunk, drafter: Drafter, places: int, least_chance: float) -> Chunk:
        """Add at most `places` drafts to a decode, and only into pages that no decode needs now."""
        request, pool, page_size = chunk.request, self.memory.pool, self.memory.page_size
        pages = len(request.pages) + (pool.num_available > len(self.running))  # each decode may need one
        most = min(places, pages * page_size - chunk.end, request.limit - 1 - chunk.end)
        drafts = drafter.drafts(most, least_chance)
        rows = request.row.rows_after(drafts)
        end = chunk.end + len(rows)
        if not rows or not self.memory.grow(request, end):
            return chunk
        return Chunk(request, chunk.start, end, True, False, drafts[: len(rows)], rows)

    def reserve(self) -> list[Request]:
        """Reserve pages for DECODE requests early, because their prefill workers hold pages in the meantime."""
        reserved: list[Request] = []
        while not self._preempted and (at := self._first_decode()) is not None:
            reserved.append(self._admit(at))
        return reserved

    def _first_decode(self) -> int | None:
        """Return the queue index of the first DECODE request, if there are pages for it and for all before it."""
        if not self._decodes_wait:
            return None
        at = next((i for i, r in enumerate(self.waiting[: MAX_OVERTAKEN_PROMPTS + 1]) if r.phase is Phase.DECODE), None)
        if at is None:
            self._decodes_wait = len(self.waiting) > MAX_OVERTAKEN_PROMPTS
            return None
        return at if self._has_room_for(self.waiting[at], self.waiting[:at]) else None

    def _next(self, prompts: list[Request], *, admit: bool, more: bool) -> Request | None:
        """Admit requests that sort before the next of `prompts`, which is in reverse order, then pop the next.

        Args:
            admit: False after a preemption, because the preempted request would be admitted again.
            more: whether there is budget left.
        """
        while admit and self._new_prompt_is_next(prompts, more=more) and self._can_admit():
            prompts.append(self._admit())
            prompts.sort(key=prompt_order, reverse=True)
        return prompts.pop() if prompts and more else None

    def _new_prompt_is_next(self, prompts: list[Request], *, more: bool) -> bool:
        if not self.waiting or self.waiting[0].phase is Phase.DECODE:  # it is not overtaken
            return False
        if not more or not prompts:
            return more
        first = prompt_order(prompts[-1])
        # requests later in the queue cannot come before it
        soon = takewhile(lambda request: queue_order(request) <= first, self.waiting)
        return any(prompt_order(request) < first for request in soon)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and self._has_room_for(self.waiting[0])

    def _has_room_for(self, request: Request, before: Sequence[Request] = ()) -> bool:
        """Return whether there is room for `request` now, and later for those `before` it."""
        if len(self.running) + len(self.reserved) + len(before) >= self._max_running:
            return False
        return self.memory.fits(request, [*self.running, *self.reserved], before)

    def _admit(self, at: int = 0) -> Request:
        request = self.waiting.pop(at)
        self.memory.admit(request)
        if request.phase is Phase.DECODE:
            if request.may_load:  # once, because prefill sends the other pages
                self.memory.load(request, LOADED_BESIDE_DECODES if self.running else ALL_PAGES)
                request.may_load = False
            request.advance(RequestState.RESERVED)
            insort(self.reserved, request, key=by_rank)
        else:
            request.advance(RequestState.RUNNING)
            insort(self.running, request, key=by_rank)
        return request

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Get pages for a decode, by preemption if needed, but not of PREFILL requests, whose pages a transfer reads.

        Returns: False if the decode itself was preempted.
        """
        while not self.memory.grow(request, num_tokens):
            last = next(r for r in reversed(self.running) if r.phase is not Phase.PREFILL)
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        assert request.in_flight is None, "pages that are being written would be given away"
        log.info("request preempted", extra={"request_id": request.id, "tokens": len(request.tokens)})
        self.running.remove(request)
        self.memory.give_back(request)
        request.advance(RequestState.WAITING)
        self.add(request)
        self.preemptions += 1


def chunk_length(pending: int, budget: int) -> int:
    """Return how many of the `pending` prompt tokens a step computes.

    It never computes one token of a longer prompt alone, and never leaves one: a matrix product with one row rounds
    differently, so results would depend on the batch (batch invariance).
    """
    if pending <= budget:
        return pending
    length = budget - 1 if pending == budget + 1 else budget
    return length if length > 1 else 0
