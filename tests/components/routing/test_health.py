"""Breakers and warming by a virtual clock."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from components.errors import IllegalTransition
from components.lifecycle import Lifecycle
from components.routing.health import (
    DEFAULT_SETTINGS,
    FIRST_SHARE,
    MAX_CREDIT,
    NEXT,
    WARM_S,
    Breaker,
    BreakerSettings,
    BreakerState,
    Health,
)
from components.routing.policy import LeastLoad, Member, RouteRequest, prompt_load

B = BreakerState


@pytest.mark.parametrize("one", B)
@pytest.mark.parametrize("other", B)
def test_a_breaker_makes_the_moves_of_its_table_only(one: B, other: B) -> None:
    lifecycle = Lifecycle("breaker", NEXT, one)
    if (one, other) in {(B.CLOSED, B.OPEN), (B.OPEN, B.HALF_OPEN), (B.HALF_OPEN, B.CLOSED), (B.HALF_OPEN, B.OPEN)}:
        lifecycle.advance(other)
        assert lifecycle.state is other
    else:
        with pytest.raises(IllegalTransition):
            lifecycle.advance(other)


class BreakerByTheClock(RuleBasedStateMachine):
    """Random events, compared with a model of plain counters."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker("a", Random(0), DEFAULT_SETTINGS)
        self.now = 0.0
        self.in_a_row = 0  # failures since the last success or opening, while closed
        self.tries = 0  # failed ones since it was closed
        self.opened_s = 0.0
        self.trying_s: float | None = None

    @property
    def back_off_s(self) -> float:
        return min(DEFAULT_SETTINGS.max_backoff_s, DEFAULT_SETTINGS.first_backoff_s * 2.0**self.tries)

    @precondition(lambda self: self.now >= self.breaker.ready_s)
    @rule()
    def a_request_goes(self) -> None:
        if self.breaker.state is not B.CLOSED:
            assert self.now >= self.opened_s + self.back_off_s / 2
            assert self.trying_s is None or self.now >= self.trying_s + DEFAULT_SETTINGS.trial_timeout_s
            self.trying_s = self.now
        trial = self.breaker.sent(self.now)
        assert (trial is None) == (self.trying_s is None)
        assert self.breaker.state is (B.CLOSED if self.trying_s is None else B.HALF_OPEN)
        assert self.breaker.state is B.CLOSED or self.breaker.ready_s > self.now  # a single one

    @rule()
    def one_comes_back_well(self) -> None:
        was = self.breaker.state
        assert self.breaker.succeeded() == (was is B.HALF_OPEN)
        if was is not B.OPEN:
            assert self.breaker.state is B.CLOSED
            self.in_a_row = self.tries = 0
            self.trying_s = None

    @rule()
    def one_fails(self) -> None:
        was, until = self.breaker.state, self.breaker.ready_s
        self.breaker.failed(self.now)
        if was is B.OPEN:
            assert (self.breaker.state, self.breaker.ready_s) == (was, until)
            return
        self.in_a_row += 1
        if was is B.HALF_OPEN:
            self.tries += 1
        elif self.in_a_row < DEFAULT_SETTINGS.failures:
            assert self.breaker.state is B.CLOSED
            return
        assert self.breaker.state is B.OPEN
        self.opened_s, self.trying_s = self.now, None

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def an_open_one_waits_between_half_of_its_back_off_and_all_of_it(self) -> None:
        if self.breaker.state is B.OPEN:
            waits = self.breaker.ready_s - self.opened_s
            assert self.back_off_s / 2 <= waits + 1e-9
            assert waits <= self.back_off_s + 1e-9
        elif self.breaker.state is B.CLOSED:
            assert self.breaker.ready_s == 0


BreakerByTheClock.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestBreakerByTheClock = BreakerByTheClock.TestCase


def test_back_offs_of_several_routers_end_at_different_times() -> None:
    ends = set()
    for seed in range(20):
        breaker = Breaker("a", Random(seed), BreakerSettings(failures=1))
        breaker.failed(0.0)
        ends.add(round(breaker.ready_s, 2))
    assert len(ends) > 10


def old_fleet(count: int, health: Health) -> list[Member]:
    members = [Member(f"i{at:03}") for at in range(count)]
    for member in members:
        health.joined(member.instance_id, -WARM_S)
    return members


def names(members: object) -> str:
    return " ".join(m.instance_id for m in members)  # type: ignore[attr-defined]


def test_an_instance_that_fails_three_times_in_a_row_is_excluded_then_gets_one_trial() -> None:
    health = Health(Random(0))
    members = old_fleet(3, health)
    for _ in range(2):
        health.failed("i001", 0.0)
    assert names(health.candidates(members, 0.0)) == "i000 i001 i002"
    health.succeeded("i001", 0.0)
    for _ in range(2):
        health.failed("i001", 0.0)
    assert health.state("i001") is B.CLOSED
    health.failed("i001", 0.0)
    assert names(health.candidates(members, 0.4)) == "i000 i002"
    assert names(health.candidates(members, 1.0)) == "i000 i001 i002"
    health.sent("i001", 1.0)
    assert health.state("i001") is B.HALF_OPEN
    assert names(health.candidates(members, 1.0)) == "i000 i002"
    health.succeeded("i001", 1.0)
    assert names(health.candidates(members, 1.0)) == "i000 i001 i002"


def test_a_trial_without_a_result_blocks_its_instance_for_a_while_only() -> None:
    health = Health(Random(0), BreakerSettings(failures=1))
    members = old_fleet(2, health)
    health.failed("i000", 0.0)
    health.sent("i000", 1.0)
    assert names(health.candidates(members, 1.0 + DEFAULT_SETTINGS.trial_timeout_s - 0.1)) == "i001"
    assert names(health.candidates(members, 1.0 + DEFAULT_SETTINGS.trial_timeout_s)) == "i000 i001"


def test_an_undecided_trial_lets_another_one_follow() -> None:
    health = Health(Random(0), BreakerSettings(failures=1))
    members = old_fleet(1, health)
    assert health.sent("i000", 0.0) is None
    health.failed("i000", 0.0)
    assert health.sent("i000", 0.1) is None, "sent though no request may be"
    trial = health.sent("i000", 1.1)
    assert trial is not None
    assert names(health.candidates(members, 1.2, or_none=True)) == ""
    health.undecided("i000", trial, 1.3)
    assert names(health.candidates(members, 1.3, or_none=True)) == "i000"
    assert health.sent("i000", 1.3) is not None
    health.undecided("i000", trial, 1.4)
    assert names(health.candidates(members, 1.4, or_none=True)) == "", "one at a time"
    assert health.state("i000") is B.HALF_OPEN


def test_when_every_breaker_is_open_all_instances_are_candidates() -> None:
    health = Health(Random(0), BreakerSettings(failures=1))
    members = old_fleet(3, health)
    for member in members[1:]:
        health.failed(member.instance_id, 0.0)
    assert names(health.candidates(members, 0.1)) == "i000"
    health.failed("i000", 0.1)
    assert names(health.candidates(members, 0.2)) == "i000 i001 i002"
    assert names(health.candidates(members, 0.2, or_none=True)) == ""
    assert names(health.candidates(members, 1.1, or_none=True)) == "i000 i001 i002", "each is tried again in time"


def test_an_instance_that_is_gone_is_gone_with_its_failures() -> None:
    health = Health(Random(0), BreakerSettings(failures=1))
    members = old_fleet(2, health)
    health.failed("i000", 0.0)
    health.left("i000")
    health.failed("i000", 0.1)  # an earlier request
    assert health.state("i000") is B.CLOSED
    health.joined("i000", 0.2)
    assert names(health.candidates(members, 0.2)) == "i000 i001"


@pytest.mark.parametrize("failed_before", [False, True])
def test_one_that_comes_or_comes_back_idle_gets_a_share_that_grows(failed_before: bool) -> None:
    """Least load alone would send it every request until its load equals the others'."""
    health, policy = Health(Random(0), BreakerSettings(failures=1)), LeastLoad(Random(0), prompt_load)
    members = old_fleet(9, health)
    for member in members:
        member.queued_tokens = 10**9
    new = Member("new")
    health.joined("new", 0.0 - WARM_S * failed_before)
    members.append(new)
    if failed_before:
        health.failed("new", -2.0)
        health.sent("new", 0.0)
        health.succeeded("new", 0.0)
    per_s, got = 200, [0] * int(WARM_S)
    for at in range(per_s * int(WARM_S)):
        now_s = at / per_s
        choice = policy.choose(RouteRequest(1), health.candidates(members, now_s), {}, now_s)
        health.sent(choice.member.instance_id, now_s)
        got[int(now_s)] += choice.member is new
    fair = per_s / 10
    for second, count in enumerate(got):
        share = FIRST_SHARE + (1 - FIRST_SHARE) * (second + 1) / WARM_S
        assert count <= fair * share + MAX_CREDIT
        assert count >= fair * (FIRST_SHARE + (1 - FIRST_SHARE) * second / WARM_S) - 2
    assert sum(got) < 0.62 * fair * WARM_S
    for at in range(100):
        now_s = WARM_S + at / per_s
        choice = policy.choose(RouteRequest(1), health.candidates(members, now_s), {}, now_s)
        assert choice.member is new  # warm: the policy alone decides


def test_credit_does_not_count_while_all_instances_are_new() -> None:
    health = Health(Random(0))
    members = [Member("a"), Member("b")]
    for member in members:
        health.joined(member.instance_id, 0.0)
    for _ in range(20):
        assert len(health.candidates(members, 0.1)) == 2
        health.sent("a", 0.1)


def test_where_all_others_fail_a_new_one_takes_what_there_is() -> None:
    health = Health(Random(0), BreakerSettings(failures=1))
    members = [*old_fleet(1, health), Member("new")]
    health.joined("new", 0.0)
    health.sent("new", 0.0)
    assert names(health.candidates(members, 0.0)) == "i000"
    health.failed("i000", 0.0)
    assert names(health.candidates(members, 0.0)) == "new"
