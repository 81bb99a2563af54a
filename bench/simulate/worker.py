"""A simulated worker: the engine's scheduler and cost model, with many steps at once.

Between two events that change a step's composition, each step is longer than the previous one by the same amount. Such
steps are one `Run`, whose end is computed in closed form.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import takewhile
from operator import attrgetter
from typing import Final, Protocol

from bench.simulate.clock import Clock
from bench.simulate.prefix import PagePool
from bench.simulate.steps import Part, Progress, Run, Stay
from bench.simulate.traffic import Request
from components.routing.policy import LATEST_SPEED_WEIGHT
from engine.config import MockConfig, attended
from engine.ports import turn
from engine.scheduler.request import usable_pages
from engine.scheduler.scheduler import chunk_length

by_turn: Final = attrgetter("turn")


@dataclass(frozen=True, slots=True)
class Engine:
    """Parameters of a worker's engine. `page_tokens` is the size of a trace's block."""

    cost: MockConfig = field(default_factory=MockConfig)
    num_pages: int = 512
    page_tokens: int = 512
    max_running: int = 64
    max_step_tokens: int = 2048
    devices: int = 1  # devices that compute together; `cost` is that of all of them


class Owner(Protocol):
    def reserved(self, worker: "Worker", stay: Stay) -> None:
        pass

    def computed(self, worker: "Worker", stay: Stay) -> None:
        pass

    def finished(self, worker: "Worker", stay: Stay) -> None:
        pass

    def stepped(self, steps: int, each_s: float, decodes: int) -> None:
        pass

    def cache_changed(self, worker: "Worker", stored: list[bytes], removed: list[bytes]) -> None:
        pass


class Worker:
    def __init__(self, name: str, engine: Engine, clock: Clock, owner: Owner) -> None:
        self.name = name
        self.engine = engine
        self.pool = PagePool(engine.num_pages)
        self.alive = True
        self.draining = False
        self.slowness = 1.0  # factor of every step's time
        self.since_s = clock.now_s
        self.until_s: float | None = None  # when it ended
        self.waiting: deque[Stay] = deque()
        self.prompts: list[Stay] = []
        self.reserved: dict[Stay, None] = {}  # in order of admission
        self.decodes = 0
        self.steps = 0
        self.context = 0  # tokens that decodes attend to in the next step
        self.queued_tokens = 0  # accepted prompt tokens neither computed nor cached, as of the last run
        self.prompt_tokens_per_s = 0.0
        self.busy_s = 0.0
        self.prompt_tokens = 0  # tokens of prompts computed here
        self.cached_tokens = 0  # cached ones of those
        self.done = Progress()
        self._ends: list[tuple[int, int, Stay]] = []
        self._delivered: list[Stay] = []
        self._run: Run | None = None
        self._version = 0
        self._settling = False  # whether a run has ended and the next one is not yet planned
        self._number = 0
        self._arrivals = 0
        self._clock = clock
        self._owner = owner

    @property
    def running(self) -> int:
        return len(self.prompts) + self.decodes + len(self.reserved)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running and not self.pool.used

    def queued_now(self) -> int:
        run = self._run
        if run is None or not run.chunks:
            return self.queued_tokens
        done = max(0, run.steps_until(self._clock.now_s) - 1)
        return self.queued_tokens - done * sum(length for _, length in run.chunks)

    def progress(self) -> Progress:
        now = replace(self.done)
        if (run := self._run) is not None:
            now.add(run, max(0, run.steps_until(self._clock.now_s) - 1))
        return now

    def found(self, request: Request, tokens: int) -> int:
        """Return the number of cached tokens among the first `tokens`; the last ones are always computed."""
        page = self.engine.page_tokens
        return self.pool.match(request.blocks, usable_pages(tokens, page)) * page

    def submit(self, stay: Stay) -> None:
        if stay.part is not Part.DECODE:
            self.queued_tokens += stay.tokens
        fresh = stay.tokens == stay.request.prompt  # otherwise it has moved here
        stay.turn = turn(self._arrivals, 0, stay.tokens if fresh else 0)
        self._arrivals += 1
        self.waiting.append(stay)
        passes = self._run is not None and any(one.turn > stay.turn for one, _ in self._run.chunks)
        if self.waiting[0] is stay or passes:  # later ones wait for the same pages or slots in the batch
            self.poke()

    def deliver(self, stay: Stay) -> None:
        self._delivered.append(stay)
        self._interrupt()

    def release(self, stay: Stay) -> None:
        self.pool.give_back(stay.shared, stay.private)
        stay.shared, stay.private = [], 0
        self.poke()

    def cancel(self, stay: Stay) -> None:
        """Cancel a stay. One that is being computed is dropped when its step ends."""
        stay.gone = True
        if stay in self.waiting:
            self.waiting.remove(stay)
            if stay.part is not Part.DECODE:
                self.queued_tokens -= stay.tokens
        elif stay in self.reserved:
            del self.reserved[stay]
            if stay in self._delivered:
                self._delivered.remove(stay)
            self.release(stay)

    def stop(self) -> list[Stay]:
        """Stop the worker. Return its requests, with `left` unchanged."""
        lost = [*self.waiting, *self.prompts, *self.reserved]
        done = self._run.steps_until(self._clock.now_s) - 1 if self._run else 0
        self._account(done)
        for last_step, _, stay in self._ends:
            stay.left = last_step - self.steps
            lost.append(stay)
        self.alive, self._run, self.until_s = False, None, self._clock.now_s
        self._version += 1
        return lost

    def poke(self) -> None:
        if self._settling:
            return
        if self._run is None:
            self._begin()
        elif self._admit_reserved() and self.running < self.engine.max_running and self._may_join(self._run):
            self._interrupt()

    def set_slowness(self, slowness: float) -> None:
        self.slowness = slowness
        if self._run is not None:
            self._interrupt()

    def _may_join(self, run: Run) -> bool:
        """Return whether a waiting request would join the next step, because there is budget or it has precedence."""
        spent = run.decodes + sum(length for _, length in run.chunks)
        last = max((stay.turn for stay, _ in run.chunks), default=(-1, -1))
        return spent < self.engine.max_step_tokens or self._is_passed(last)

    def _is_passed(self, place: tuple[int, int]) -> bool:
        return any(stay.turn < place for stay in takewhile(lambda stay: stay.turn[1] <= place[0], self.waiting))

    def _interrupt(self) -> None:
        run = self._run
        if run is None:
            if not self._settling:
                self._begin()
            return
        steps = run.steps_until(self._clock.now_s)
        if steps < run.steps:
            run.steps = steps
            self._schedule(run)

    def _schedule(self, run: Run) -> None:
        self._version += 1
        self._clock.at(max(self._clock.now_s, run.start_s + run.seconds(run.steps)), self._end, self._version)

    def _begin(self) -> None:
        if not self.alive:
            return
        for stay in self._delivered:
            del self.reserved[stay]
            self._decode(stay)
        self._delivered.clear()
        chunks = self._chunks()
        if changes := self.pool.take_changes():
            self._owner.cache_changed(self, *changes)
        if not chunks and not self.decodes:
            self._run = None
            return
        self._run = run = self._plan(chunks)
        self._schedule(run)

    def _chunks(self) -> list[tuple[Stay, int]]:
        budget = self.engine.max_step_tokens - self.decodes
        chunks = []
        begun = sorted(self.prompts, key=by_turn, reverse=True)
        while (stay := self._next(begun, budget)) is not None:
            length = chunk_length(stay.tokens - stay.computed, budget)
            if not length:
                break
            chunks.append((stay, length))
            budget -= length
        return chunks

    def _next(self, begun: list[Stay], budget: int) -> Stay | None:
        """Return the next of those `begun`; queued ones with precedence over all of them join."""
        while self._admit_reserved() and budget:
            if begun and not self._is_passed(begun[-1].turn):
                break
            if not self._admit(self.waiting[0]):
                break
            stay = self.waiting.popleft()
            self.queued_tokens -= stay.cached
            self.prompts.append(stay)
            begun.append(stay)
            begun.sort(key=by_turn, reverse=True)
        if not budget or not begun:
            return None
        stay = begun.pop()
        if stay.computed == stay.cached:
            stay.began_s = self._clock.now_s
        return stay

    def _admit_reserved(self) -> bool:
        """Allocate pages for the first requests that need only pages. Return whether the queue's head changed."""
        while self.waiting and self.waiting[0].part is Part.DECODE:
            if not self._admit(self.waiting[0]):
                return False
            stay = self.waiting.popleft()
            self.reserved[stay] = None
            self._owner.reserved(self, stay)
        return bool(self.waiting)

    def _admit(self, stay: Stay) -> bool:
        if self.running >= self.engine.max_running:
            return False
        page = self.engine.page_tokens
        blocks = stay.request.blocks
        found = self.found(stay.request, stay.tokens) // page
        last = stay.tokens + stay.left - (stay.part is not Part.DECODE)  # the last token's KV is never computed
        if not self.pool.take(blocks[:found], private := -(-last // page) - found):
            return False
        stay.shared, stay.private = list(blocks[:found]), private
        stay.cached = stay.computed = found * page
        return True

    def _plan(self, chunks: list[tuple[Stay, int]]) -> Run:
        cost, slowness = self.engine.cost, self.slowness
        tokens = sum(length for _, length in chunks)
        pairs = sum(attended(stay.computed, length) for stay, length in chunks)
        first_s = cost.duration_s(tokens, self.decodes, self.context, pairs) * slowness
        grow_s = self.decodes * cost.context_token_s
        steps = self._ends[0][0] - self.steps if self._ends else 1 << 60
        if chunks:
            stay, length = chunks[0]
            alone = len(chunks) == 1 and self.decodes + length == self.engine.max_step_tokens
            pending = stay.tokens - stay.computed
            # the chunk before the last is shorter if one token would be left
            steps = min(steps, max(1, pending // length - (pending % length == 1))) if alone else 1
            grow_s += length * length * cost.attention_s
        return Run(self._clock.now_s, first_s, grow_s / cost.speedup * slowness, steps, self.decodes, chunks)

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # planned again
        run = self._run
        assert run is not None
        self._account(run.steps)
        self._run, self._settling = None, True
        for stay, _ in run.chunks:
            if stay.computed == stay.tokens:
                self._prompt_done(stay)
        while self._ends and self._ends[0][0] <= self.steps:
            stay = heappop(self._ends)[2]
            self.decodes -= 1
            self.context -= stay.tokens + 1 + stay.left
            self._leave(stay)
        self._settling = False
        self._begin()

    def _account(self, steps: int) -> None:
        run = self._run
        if run is None or steps <= 0:
            return
        seconds = run.seconds(steps)
        self.done.add(run, steps)
        self.busy_s += seconds
        self.steps += steps
        self.context += run.decodes * steps
        for stay, length in run.chunks:
            stay.computed += length * steps
            self.queued_tokens -= length * steps
        if run.chunks and seconds > 0:
            speed = sum(length for _, length in run.chunks) * steps / seconds
            before = self.prompt_tokens_per_s or speed
            self.prompt_tokens_per_s = before + (1 - (1 - LATEST_SPEED_WEIGHT) ** steps) * (speed - before)
        if run.decodes:
            self._owner.stepped(steps, seconds / steps, run.decodes)

    def _prompt_done(self, stay: Stay) -> None:
        self.prompts.remove(stay)
        self.prompt_tokens += stay.tokens
        self.cached_tokens += stay.cached
        self._publish(stay)
        if stay.gone:
            self._give_back(stay)
            return
        if stay.part is Part.FULL and stay.left > 1:
            stay.left -= 1
            self._decode(stay)
            self._owner.computed(self, stay)
            return
        self._owner.computed(self, stay)
        if stay.part is Part.FULL:
            self._leave(stay)

    def _decode(self, stay: Stay) -> None:
        if stay.part is Part.DECODE:
            self._publish(stay)
        self._number += 1
        heappush(self._ends, (self.steps + stay.left, self._number, stay))
        self.decodes += 1
        self.context += stay.tokens + 1  # the drawn token is computed next

    def _publish(self, stay: Stay) -> None:
        full = stay.request.blocks[len(stay.shared) : stay.tokens // self.engine.page_tokens]
        mine = self.pool.publish(full)
        stay.shared += mine
        stay.private -= len(mine)

    def _leave(self, stay: Stay) -> None:
        self._give_back(stay)
        if not stay.gone:
            self._owner.finished(self, stay)

    def _give_back(self, stay: Stay) -> None:
        self.pool.give_back(stay.shared, stay.private)
        stay.shared, stay.private = [], 0
