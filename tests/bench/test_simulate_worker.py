"""A simulated worker: schedules by hand, and a model that takes single steps."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate.clock import Clock
from bench.simulate.prefix import PagePool
from bench.simulate.steps import Part, Stay
from bench.simulate.traffic import Request
from bench.simulate.worker import Engine, Worker
from engine.config import MockConfig, attended
from engine.ports import turn
from engine.scheduler.scheduler import chunk_length

COST = MockConfig(step_s=1.0, prompt_token_s=0.1, decode_s=0.5, context_token_s=0.01)


@dataclass
class Diary:
    """Records what a worker reports."""

    clock: Clock
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    gaps_s: float = 0.0
    reserved_s: dict[int, float] = field(default_factory=dict)

    def reserved(self, worker: Worker, stay: Stay) -> None:
        self.reserved_s[stay.request.number] = self.clock.now_s

    def computed(self, worker: Worker, stay: Stay) -> None:
        self.first_s[stay.request.number] = self.clock.now_s

    def finished(self, worker: Worker, stay: Stay) -> None:
        self.last_s[stay.request.number] = self.clock.now_s

    def stepped(self, steps: int, each_s: float, decodes: int) -> None:
        self.tokens += steps * decodes
        self.gaps_s += steps * each_s * decodes

    def cache_changed(self, worker: Worker, stored: list[bytes], removed: list[bytes]) -> None:
        pass


def work(engine: Engine, requests: list[Request]) -> tuple[Worker, Diary]:
    """Let one worker complete the requests."""
    clock = Clock()
    diary = Diary(clock)
    worker = Worker("w", engine, clock, diary)
    for request in requests:
        clock.at(request.at_s, worker.submit, Stay(request, Part.FULL, request.prompt, request.output))
    clock.run(lambda: True)
    return worker, diary


def stepwise(engine: Engine, requests: list[Request]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the times of first and last tokens, by a loop over steps and requests."""
    now_s = 0.0
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    coming = sorted(requests, key=lambda r: (r.at_s, r.number))
    turns: dict[Request, tuple[int, int]] = {}
    waiting: list[Request] = []
    computed: dict[Request, int] = {}
    drawn: dict[Request, int] = {}
    while coming or waiting or computed:
        while coming and coming[0].at_s <= now_s + 1e-9:
            turns[coming[0]] = turn(len(turns), 0, coming[0].prompt)
            waiting.append(coming.pop(0))
        budget, tokens, decodes, context, pairs = engine.max_step_tokens, 0, 0, 0, 0
        done: list[Request] = []
        for request, tokens_there in computed.items():
            if tokens_there == request.prompt:
                decodes, context, budget = decodes + 1, context + request.prompt + drawn[request], budget - 1
                done.append(request)
        begun = sorted((r for r in computed if computed[r] < r.prompt), key=turns.__getitem__)
        while budget:
            while waiting and len(computed) < engine.max_running:
                if begun and min(map(turns.__getitem__, waiting)) > turns[begun[0]]:
                    break
                computed[waiting[0]] = drawn[waiting[0]] = 0
                begun = sorted([*begun, waiting.pop(0)], key=turns.__getitem__)
            if not begun:
                break
            request = begun.pop(0)
            start = computed[request]
            length = chunk_length(request.prompt - start, budget)
            if not length:
                break
            pairs += attended(start, length)
            computed[request] = start + length
            tokens, budget = tokens + length, budget - length
            if start + length == request.prompt:
                done.append(request)
        if not tokens and not decodes:
            now_s = coming[0].at_s
            continue
        now_s += engine.cost.duration_s(tokens, decodes, context, pairs)
        for request in done:
            drawn[request] += 1
            first_s.setdefault(request.number, now_s)
            if drawn[request] == request.output:
                last_s[request.number] = now_s
                del computed[request]
    return first_s, last_s


def test_a_schedule_by_hand() -> None:
    """Budget 4: a prompt of 10 takes 4, 4, 2, then two decodes; then another of 4 joins with 2, then 2."""
    engine = Engine(COST, max_step_tokens=4)
    worker, diary = work(engine, [Request(0, 0.0, 10, 3, []), Request(1, 4.5, 4, 1, [])])
    assert diary.first_s == pytest.approx({0: 1.4 + 1.4 + 1.2, 1: 4.0 + 1.61 + (1.62 + 0.2) + 1.2})
    assert diary.last_s == pytest.approx({0: 4.0 + 1.61 + 1.82, 1: 8.63})
    assert worker.steps == 6
    assert worker.busy_s == pytest.approx(8.63), "it was never idle"
    assert (diary.tokens, diary.gaps_s) == (2, pytest.approx(1.61 + 1.82))
    assert worker.idle


def test_long_answers_are_one_event_however_many_tokens_they_have() -> None:
    clock = Clock()
    diary = Diary(clock)
    worker = Worker("w", Engine(COST, num_pages=4096), clock, diary)
    for number in range(8):
        worker.submit(Stay(Request(number, 0.0, 100, 100_000, []), Part.FULL, 100, 100_000))
    clock.run(lambda: True)
    assert worker.steps > 99_999
    assert clock.events < 20
    assert len(diary.last_s) == 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_many_steps_at_once_are_what_each_step_alone_would_be(seed: int) -> None:
    draw = random.Random(seed)
    cost = MockConfig(step_s=0.9, prompt_token_s=0.11, decode_s=0.53, context_token_s=0.013, attention_s=0.0007)
    engine = Engine(
        cost, num_pages=4096, max_running=draw.choice([1, 3, 64]), max_step_tokens=draw.choice([67, 90, 200])
    )
    scale = draw.choice([1.0, 30.0, 300.0])
    requests = [
        Request(n, draw.random() * scale, draw.randint(1, 400), draw.randint(1, 60), [])
        for n in range(draw.randint(1, 12))
    ]
    worker, diary = work(engine, requests)
    first_s, last_s = stepwise(engine, requests)
    assert diary.first_s == pytest.approx(first_s)
    assert diary.last_s == pytest.approx(last_s)
    assert worker.queued_tokens == worker.pool.used == worker.context == 0


def test_who_finds_no_pages_waits_until_some_are_given_back() -> None:
    engine = Engine(COST, num_pages=3, page_tokens=8, max_step_tokens=64)
    _, diary = work(engine, [Request(0, 0.0, 8, 9, []), Request(1, 0.0, 8, 1, []), Request(2, 0.0, 8, 9, [])])
    assert diary.first_s[1] == pytest.approx(1.8 + 2.39), "two pages and one: both at once"
    assert diary.first_s[2] > diary.last_s[0], "its second page is not there before the first request ends"


def test_a_reserved_request_decodes_from_the_step_after_its_kv_has_come() -> None:
    clock = Clock()
    diary = Diary(clock)
    worker = Worker("w", Engine(COST), clock, diary)
    stay = Stay(Request(7, 0.0, 9, 3, []), Part.DECODE, 9, 2)
    worker.submit(stay)
    assert diary.reserved_s == {7: 0.0}
    assert (worker.running, worker.decodes, worker.pool.used) == (1, 0, 1)
    clock.at(5.0, worker.deliver, stay)
    clock.run(lambda: True)
    assert diary.last_s == pytest.approx({7: 5.0 + 1.6 + 1.61})
    assert worker.idle


def test_a_slow_worker_finishes_the_step_under_way_as_it_began_it() -> None:
    clock = Clock()
    diary = Diary(clock)
    worker = Worker("w", Engine(MockConfig(step_s=1.0, decode_s=0, context_token_s=0, prompt_token_s=0)), clock, diary)
    worker.submit(Stay(Request(0, 0.0, 4, 6, []), Part.FULL, 4, 6))
    clock.at(2.5, worker.set_slowness, 10.0)
    clock.run(lambda: True)
    assert diary.last_s == pytest.approx({0: 3 + 3 * 10})


def test_what_is_lost_with_a_worker_is_told_with_its_tokens_left() -> None:
    clock = Clock()
    worker = Worker(
        "w", Engine(MockConfig(step_s=1.0, decode_s=0, context_token_s=0, prompt_token_s=0)), clock, Diary(clock)
    )
    stays = [Stay(Request(n, 0.0, 4, 10, []), Part.FULL, 4, 10) for n in range(2)]
    worker.submit(stays[0])
    clock.at(3.5, worker.submit, stays[1])
    clock.run(lambda: clock.now_s < 3.5)
    assert worker.stop() == [stays[1], stays[0]]
    assert [stay.left for stay in stays] == [7, 10], "one token from the prompt and two steps that were over"
    clock.run(lambda: True)
    assert worker.steps == 3, "nothing happens any more"


def test_pages_are_shared_while_somebody_has_them_and_evicted_oldest_and_deepest_first() -> None:
    pool = PagePool(4)
    assert pool.take([], 3)
    assert pool.publish([b"a", b"b"]) == [b"a", b"b"]
    assert pool.take_changes() == ([b"a", b"b"], [])
    assert pool.match([b"a", b"b", b"c"], 9) == 2
    assert pool.match([b"a", b"b"], 1) == 1, "at most so many"
    assert pool.take([b"a"], 1), "the fourth page"
    assert not pool.take([], 1)
    pool.give_back([b"a", b"b"], 1)
    assert (pool.used, pool.cached) == (2, 1), "a is still used by the second"
    pool.give_back([b"a"], 1)
    assert (pool.used, pool.cached) == (0, 2)
    assert pool.take([], 3)
    assert pool.take_changes() == ([], [b"b"]), "the end of a prefix goes before its beginning"
    assert pool.match([b"a"], 9) == 1
    assert pool.publish([b"a", b"d"]) == [b"d"], "what is here already is not named twice"
