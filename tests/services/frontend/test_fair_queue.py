"""Order and bounds of those who wait, without a clock."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.ports import OVERTAKEN_TOKENS, OVERTAKERS
from services.frontend.fair_queue import AdmissionTicket, FairQueue

A, B, C = b"a", b"b", b"c"
ENDLESS = 10**9


def waiting(key: bytes = A, tokens: int = 1, priority: int = 0, since_s: float = 0.0) -> AdmissionTicket:
    return AdmissionTicket(key, priority, tokens, since_s)


def queue_of(*several: AdmissionTicket, max_tokens: int = ENDLESS) -> FairQueue:
    queue = FairQueue(max_tokens)
    for one in several:
        assert queue.put(one) == []
    return queue


def drained(queue: FairQueue) -> list[AdmissionTicket]:
    return [queue.take() for _ in range(len(queue))]


class EveryWayThrough(RuleBasedStateMachine):
    """Requests arrive, are admitted, give up and are charged in any order. None is lost or admitted twice; bounds hold."""

    MAX = 10_000  # some are long enough to let others pass

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(self.MAX)
        self.there: list[AdmissionTicket] = []

    @rule(key=st.sampled_from([A, B, C]), tokens=st.integers(1, 6000), priority=st.sampled_from([-3, 0, 1]))
    def put(self, key: bytes, tokens: int, priority: int) -> None:
        one = waiting(key, tokens, priority)
        leaving = self.queue.put(one)
        if leaving == [one]:
            assert tokens + sum(other.tokens for other in self.there if other.priority <= priority) > self.MAX
            return
        for other in leaving:
            self.there.remove(other)
            assert other.priority >= priority
            assert other.priority > priority or other.key != key
        self.there.append(one)

    @precondition(lambda self: self.there)
    @rule()
    def take(self) -> None:
        one = self.queue.take()
        line = [o for o in self.there if (o.key, o.priority) == (one.key, one.priority)]
        assert one == min(line, key=lambda o: (o.arrival + o.tokens // OVERTAKEN_TOKENS, o.arrival))
        self.there.remove(one)

    @precondition(lambda self: self.there)
    @rule(which=st.randoms(use_true_random=False))
    def give_up(self, which: Random) -> None:
        one = which.choice(self.there)
        self.there.remove(one)
        self.queue.remove(one)

    @rule(key=st.sampled_from([A, B, C]), tokens=st.integers(0, 9000), priority=st.sampled_from([-3, 0, 1]))
    def charge(self, key: bytes, tokens: int, priority: int) -> None:
        self.queue.charge(key, priority, tokens)

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.there)
        assert self.queue.tokens == sum(one.tokens for one in self.there)
        assert self.queue.tokens <= self.MAX
        assert self.queue.waiting_since(0.0) == sorted(self.there, key=lambda one: one.arrival)

    def teardown(self) -> None:
        assert sorted(map(id, drained(self.queue))) == sorted(map(id, self.there))


TestEveryWayThrough = EveryWayThrough.TestCase


@given(st.dictionaries(st.sampled_from([A, B, C, b"d"]), st.integers(1, 500), min_size=2), st.randoms())
def test_what_two_waiting_keys_were_given_differs_by_a_request_of_each(largest: dict[bytes, int], draw: Random) -> None:
    queue = FairQueue(ENDLESS)
    given_tokens: Counter[bytes] = Counter()
    for key, most in largest.items():
        for _ in range(2):
            queue.put(waiting(key, draw.randint(1, most)))
    for _ in range(300):
        one = queue.take()
        given_tokens[one.key] += one.tokens
        queue.put(waiting(one.key, draw.randint(1, largest[one.key])))  # so that nobody ever stops waiting
        for (f, of_f), (g, of_g) in combinations(largest.items(), 2):
            assert abs(given_tokens[f] - given_tokens[g]) <= of_f + of_g


def test_a_key_that_comes_late_neither_has_saved_up_nor_pays_for_it() -> None:
    queue = queue_of(*(waiting(A) for _ in range(1000)))
    taken = [queue.take() for _ in range(500)]
    for _ in range(500):
        queue.put(waiting(B))
    taken = [queue.take() for _ in range(100)]
    assert abs(Counter(one.key for one in taken)[B] - 50) <= 1


def test_one_request_does_not_wait_behind_anothers_flood() -> None:
    queue = queue_of(*(waiting(A, 100) for _ in range(1000)), waiting(B, 100))
    assert B in {queue.take().key for _ in range(2)}


def test_a_long_request_lets_later_ones_of_its_key_pass_at_most_one_for_each_256_tokens() -> None:
    queue = queue_of(waiting(A, 10 * OVERTAKEN_TOKENS + 255))
    passed = 0
    while True:
        queue.put(waiting(A))
        if queue.take().tokens > 1:
            break
        passed += 1
    assert passed == 9, "the tenth has the same turn, and came later"


def test_however_long_it_is_a_request_waits_for_fewer_than_a_step_of_priority_lets_pass() -> None:
    queue = queue_of(waiting(A, 10**6), *(waiting(A) for _ in range(1000)), waiting(A, 1, -1))
    order = [(one.priority, one.tokens) for one in drained(queue)]
    assert order.index((0, 10**6)) == OVERTAKERS - 2
    assert order.index((-1, 1)) == 745, "behind those of 256 arrivals before"


def test_a_keys_long_requests_pass_nobody_of_another_and_still_cost_it_its_turns() -> None:
    queue = queue_of(*(waiting(A, 10_000) for _ in range(3)), *(waiting(A, 100) for _ in range(3)), waiting(B, 1000))
    assert [(one.key, one.tokens) for one in drained(queue)] == [
        (A, 100), (B, 1000), (A, 100), (A, 100), (A, 10_000), (A, 10_000), (A, 10_000),
    ]  # fmt: skip


def test_long_answers_cost_their_key_its_turns() -> None:
    queue = FairQueue(ENDLESS)
    for _ in range(2000):
        queue.put(waiting(A, 100))
        queue.put(waiting(B, 100))
    taken = Counter[bytes]()
    for _ in range(800):
        one = queue.take()
        taken[one.key] += 1
        queue.charge(one.key, 0, 300 if one.key == A else 0)
    assert abs(taken[B] - 4 * taken[A]) <= 5


def test_what_a_key_was_given_counts_though_it_waits_no_more_for_a_moment() -> None:
    """Otherwise a client that sends one request at a time would go first every time."""
    queue = queue_of(waiting(A, 1000), *(waiting(B, 10) for _ in range(50)))
    taken = []
    for _ in range(30):
        taken.append(queue.take())
        if taken[-1].key == A:
            queue.put(waiting(A, 1000))
    assert sum(one.key == A for one in taken) == 1


def test_lower_priority_numbers_go_first_and_their_keys_share() -> None:
    queue = queue_of(*(waiting(key, 1, priority) for priority in (1, 0, -1) for key in (A, A, B)))
    assert [(one.priority, one.key) for one in drained(queue)] == [
        (priority, key) for priority in (-1, 0, 1) for key in (A, B, A)
    ]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_stream_of_better_ones_passes_256_times_for_each_step(steps: int) -> None:
    queue = queue_of(waiting(A, 1, steps))
    passed = 0
    while True:
        queue.put(waiting(B))
        if queue.take().priority:
            break
        passed += 1
    assert passed == OVERTAKERS * steps


def test_a_flood_of_better_ones_ends_when_it_has_gone() -> None:
    """A request of a worse priority waits at most for those queued before it and 256 for each step of priority."""
    queue = queue_of(*(waiting(A, 1, 0) for _ in range(1000)), waiting(B, 1, 1))
    turns = [queue.take() for _ in range(100)]
    while turns[-1].priority == 0:
        queue.put(waiting(A))
        queue.put(waiting(A))
        turns.append(queue.take())
    assert len(turns) <= 1001 + OVERTAKERS


def test_the_age_of_a_flood_does_not_help_its_neighbours_past_a_better_one() -> None:
    """All of a priority went by its oldest, and so before a better one of 256 arrivals later."""
    queue = queue_of(*(waiting(A) for _ in range(300)), *(waiting(B) for _ in range(20)), waiting(C, 1, -1))
    assert [one.key for one in drained(queue)[:2]] == [A, C]


# what happens when it is full


def full(*several: AdmissionTicket) -> FairQueue:
    return queue_of(*several, max_tokens=sum(one.tokens for one in several))


def test_a_worse_one_makes_room_for_a_better_one_the_youngest_of_the_heaviest_key() -> None:
    several = [waiting(A, 20, 5), waiting(B, 10, 5), waiting(B, 20, 5), waiting(C, 60, 1)]
    assert full(*several).put(waiting(C, 20, 0)) == [several[2]]
    assert full(*several).put(waiting(C, 50, 0)) == [several[2], several[0], several[1]]
    assert full(*several).put(waiting(C, 51, 0)) == [several[2], several[0], several[1], several[3]]


def test_a_better_one_is_not_given_up_for_a_worse_one() -> None:
    queue = full(waiting(A, 100, 0))
    late = waiting(B, 1, 1)
    assert queue.put(late) == [late]


def test_a_flood_gives_way_to_another_key_and_not_to_itself() -> None:
    flood = [waiting(A, 10) for _ in range(10)]
    queue = full(*flood)
    more = waiting(A, 10)
    assert queue.put(more) == [more]
    assert queue.put(waiting(B, 15)) == [flood[9], flood[8]]
    assert queue.put(waiting(B, 5)) == []


def test_keys_that_have_the_same_share_refuse_whoever_wants_more() -> None:
    queue = full(waiting(A, 50), waiting(B, 50))
    more, large = waiting(B, 1), waiting(C, 50)
    assert queue.put(more) == [more]
    assert queue.put(large) == [large]
    assert len(queue) == 2, "somebody left in vain"


def test_one_larger_than_all_that_may_wait_does_so_alone() -> None:
    queue = FairQueue(100)
    assert queue.put(waiting(A, 1000)) == []
    second = waiting(B, 1000)
    assert queue.put(second) == [second]
    small = waiting(B, 10)
    assert [one.tokens for one in queue.put(small)] == [1000]
    assert drained(queue) == [small]


def sizes(queue: FairQueue) -> Iterable[int]:
    level: Any = queue._levels[0]
    return len(queue._levels), len(level._lines), len(level._order._heap), len(level._heaviest._heap)


def test_nothing_is_kept_of_those_who_have_gone() -> None:
    """A key and a priority for each request, which gives up at once, under one that waits without end."""
    queue = queue_of(waiting(A, 10**6, -128))
    queue.put(waiting(A, 10**6))
    for i in range(5000):
        one, other = waiting(b"%d" % i, 10), waiting(A, 10, i % 100)
        queue.put(one)
        queue.put(other)
        queue.charge(b"%d" % i, 0, 0)
        queue.remove(one)
        queue.remove(other)
    assert max(sizes(queue)) < 500
