"""Invariants of each policy, and its effect on a fleet over many requests."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.routing.affinity import (
    LOAD_FACTOR,
    SLACK_TOKENS,
    SPILL_TOKENS,
    BoundedHashing,
    Rendezvous,
    SessionAffinity,
    prefix_only,
    session_or_prefix,
)
from components.routing.cache_policies import SPEED_RANGE, CacheAware, KvAware, KvWeights
from components.routing.policies import (
    DEFAULT,
    LOADS,
    POLICIES,
    PolicyName,
    WorkerRole,
    parse_policy,
)
from components.routing.policy import (
    LEARN_INTERVAL_PROMPTS,
    REQUEST_TOKENS,
    Bucket,
    LeastLoad,
    Member,
    Policy,
    PolicyChoice,
    PowerOfTwo,
    RandomChoice,
    RouteRequest,
    memory_load,
    prompt_load,
)

ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")


def fleet(count: int) -> list[Member]:
    return [Member(f"i{at:04}") for at in range(count)]


def requests_of(member: Member, tokens: int) -> float:
    return member.running


def choose(
    policy: Policy, ask: RouteRequest, members: Sequence[Member], cached: Mapping[str, int] | None = None
) -> PolicyChoice:
    chosen = policy.choose(ask, members, cached or {}, 0.0)
    assert any(chosen.member is m for m in members)
    assert chosen.why
    return chosen


def give(member: Member, tokens: int) -> None:
    """Add a request, like the load book."""
    member.running += 1
    member.queued_tokens += tokens
    member.used_pages += math.ceil(tokens / member.page_size)


def named(members: list[Member]) -> list[Member]:
    for at, member in enumerate(members):
        member.instance_id = f"i{at:02}"
    return members


members_lists = st.lists(
    st.builds(
        Member,
        instance_id=st.just(""),
        queued_tokens=st.integers(0, 100_000),
        running=st.integers(0, 300),
        used_pages=st.integers(0, 10_000),
        total_pages=st.sampled_from([0, 5_000, 20_000]),
        prompt_tokens_per_s=st.sampled_from([0.0, 1.0, 900.0, 1000.0, 1e12]),
        page_size=st.sampled_from([16, 64]),
        devices=st.sampled_from([1, 1, 2, 8]),
    ),
    min_size=1,
    max_size=12,
).map(named)
asks = st.builds(
    RouteRequest,
    num_tokens=st.integers(0, 20_000),
    session=st.sampled_from(["", "s", "t"]),
    prefix=st.sampled_from([b"", b"p", b"q"]),
    explain=st.booleans(),
)
cached_maps = st.dictionaries(st.sampled_from([f"i{at:02}" for at in range(14)]), st.integers(1, 20_000), max_size=14)


# every policy


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(ROLES),
    members_lists,
    st.lists(st.tuples(asks, cached_maps), max_size=8),
    st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_a_policy_is_deterministic_with_its_seed_and_changes_no_member(
    name: PolicyName,
    role: WorkerRole,
    members: list[Member],
    sequence: list[tuple[RouteRequest, dict[str, int]]],
    seed: int,
) -> None:
    before = repr(members)
    one, other = (parse_policy(name).make(role, Random(seed)) for _ in range(2))
    for ask, cached in sequence:
        choice = choose(one, ask, members, cached)
        again = choose(other, ask, members, cached)
        assert again.member is choice.member
        if name in {"least_load", "kv_aware", "cache_aware"}:
            assert (choice.costs is not None) == ask.explain
        if choice.costs is not None:
            assert ask.explain
            assert set(choice.costs) <= {m.instance_id for m in members}
            assert choice.costs[choice.member.instance_id] < math.inf
    assert repr(members) == before


@pytest.mark.parametrize("name", POLICIES)
def test_equal_requests_of_many_sessions_spread_evenly(name: PolicyName) -> None:
    """Also without load: each of ten instances gets 300 to 500 of 4,000 requests."""
    policy, members = parse_policy(name).make("prefill", Random(1)), fleet(10)
    for at in range(4000):
        ask = RouteRequest(200, session=str(at), prefix=str(at).encode())
        give(choose(policy, ask, members).member, 200)
    assert min(m.running for m in members) >= 300
    assert max(m.running for m in members) <= 500


# those that look at the load


@given(members_lists, asks, cached_maps, st.sampled_from(ROLES), st.sampled_from([0.0, 0.5, 1.0]))
def test_least_load_is_a_minimum(
    members: list[Member], ask: RouteRequest, cached: dict[str, int], role: WorkerRole, overlap: float
) -> None:
    def cost(member: Member) -> float:
        hit = min(cached.get(member.instance_id, 0), ask.num_tokens)
        return LOADS[role](member, ask.num_tokens) - overlap * hit / member.devices

    chosen = choose(LeastLoad(Random(0), LOADS[role], overlap), ask, members, cached)
    assert cost(chosen.member) == min(map(cost, members))


def test_ties_are_broken_at_random() -> None:
    members, policy = fleet(8), LeastLoad(Random(2), prompt_load)
    found = Counter(choose(policy, RouteRequest(9), members).member.instance_id for _ in range(800))
    assert len(found) == 8
    assert min(found.values()) > 60


def test_least_load_keeps_requests_within_one_of_each_other() -> None:
    members, policy = fleet(7), LeastLoad(Random(2), prompt_load)
    for _ in range(500):
        give(choose(policy, RouteRequest(100), members).member, 100)
        assert max(m.running for m in members) - min(m.running for m in members) <= 1


@pytest.mark.parametrize("name", ["least_load", "kv_aware", "cache_aware", "power_of_two"])
@pytest.mark.parametrize("role", ROLES)
def test_an_instance_of_several_devices_gets_as_many_times_the_requests(name: PolicyName, role: WorkerRole) -> None:
    """An instance of four devices, among six of one, counted as full at a quarter of its share."""
    members, policy = fleet(7), parse_policy(name).make(role, Random(2))
    members[3].devices = 4
    for _ in range(1000):
        give(choose(policy, RouteRequest(100), members).member, 100)
    share = members[3].running / statistics.mean(m.running for m in members if m.devices == 1)
    assert share == pytest.approx(4, rel=0.1 if name != "power_of_two" else 0.5)


def test_decode_by_default_prefers_the_cached_prefix_while_memory_is_free() -> None:
    members = fleet(3)
    for member in members:
        member.total_pages = 1000
    policy = parse_policy(DEFAULT["decode"]).make("decode", Random(0))
    cached = {"i0001": 800}
    assert choose(policy, RouteRequest(1000), members, cached).member.instance_id == "i0001"
    members[1].used_pages = 60  # 960 tokens are more than 800 saved
    assert choose(policy, RouteRequest(1000), members, cached).member.instance_id != "i0001"


def test_what_finds_no_room_in_memory_weighs_tenfold() -> None:
    roomy, full = Member("a", used_pages=950, total_pages=2000), Member("b", used_pages=900, total_pages=910)
    assert memory_load(full, 160) == memory_load(Member("b", used_pages=900), 160)
    assert memory_load(full, 176) == 900 * 16 + 176 + 10 * 16
    assert choose(LeastLoad(Random(0), memory_load), RouteRequest(320), [roomy, full]).member is roomy


@pytest.mark.parametrize("seed", range(3))
def test_power_of_two_keeps_the_fullest_near_the_mean(seed: int) -> None:
    """With n instances and any number of requests, log2(log2 n) + O(1) above the mean; one choice: sqrt(m/n · log n)."""
    two, one = fleet(256), fleet(256)
    by_two, by_one = PowerOfTwo(Random(seed), requests_of), RandomChoice(Random(seed))
    for _ in range(256 * 60):
        give(choose(by_two, RouteRequest(1), two).member, 1)
        give(choose(by_one, RouteRequest(1), one).member, 1)
    assert max(m.running for m in two) - 60 <= math.log2(math.log2(256)) + 2
    assert max(m.running for m in one) - 60 > 12


def test_two_choices_are_two_instances_and_all_pairs_come() -> None:
    members, policy = fleet(3), PowerOfTwo(Random(0), requests_of)
    members[0].running = 9
    pairs = Counter(frozenset(choose(policy, RouteRequest(1, explain=True), members).costs or ()) for _ in range(600))
    assert {len(pair) for pair in pairs} == {2}
    assert len(pairs) == 3
    assert min(pairs.values()) > 140
    assert all(choose(policy, RouteRequest(1), members).member is not members[0] for _ in range(50))


# kv_aware


@given(members_lists, asks, cached_maps, st.sampled_from([0.0, 0.3, 5.0]))
@settings(max_examples=150)
def test_kv_aware_chooses_no_instance_above_its_bound(
    members: list[Member], ask: RouteRequest, cached: dict[str, int], temperature: float
) -> None:
    weights = KvWeights(temperature=temperature)
    chosen = choose(KvAware(Random(0), weights), ask, members, cached).member
    count = len(members)
    mean = sum(m.running / m.devices for m in members) / count
    mean_queued = sum(m.queued_tokens / m.devices for m in members) / count
    assert chosen.running / chosen.devices <= 2 * mean + weights.spill_requests
    assert chosen.queued_tokens / chosen.devices <= 2 * mean_queued + weights.spill_tokens


@given(members_lists, asks, cached_maps)
def test_kv_aware_at_temperature_zero_is_the_least_expected_work_of_those_not_too_full(
    members: list[Member], ask: RouteRequest, cached: dict[str, int]
) -> None:
    for member in members:
        member.prompt_tokens_per_s = 0.0
    count, weights = len(members), KvWeights(near=0, spill_requests=0, spill_tokens=0)
    crowd = 1 + sum(m.queued_tokens for m in members) / count / weights.crowd_tokens if cached else 1

    def cost(member: Member) -> float:
        hit = min(cached.get(member.instance_id, 0), ask.num_tokens)
        work = member.queued_tokens / 2 + REQUEST_TOKENS * member.running + crowd * (ask.num_tokens - hit)
        return work / member.devices

    mean = sum(m.running / m.devices for m in members) / count
    mean_queued = sum(m.queued_tokens / m.devices for m in members) / count
    fit = [m for m in members if m.running / m.devices <= 2 * mean and m.queued_tokens / m.devices <= 2 * mean_queued]
    chosen = choose(KvAware(Random(0), weights), ask, members, cached).member
    assert cost(chosen) == pytest.approx(min(map(cost, fit)))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_kv_aware_without_an_index_spreads_evenly(temperature: float) -> None:
    members, policy, rng = fleet(8), KvAware(Random(3), KvWeights(temperature=temperature)), Random(4)
    for _ in range(4000):
        tokens = rng.randrange(100, 3000)
        give(choose(policy, RouteRequest(tokens), members).member, tokens)
    total = sum(m.queued_tokens for m in members)
    assert max(m.queued_tokens for m in members) <= 1.05 * total / 8
    assert min(m.queued_tokens for m in members) >= 0.95 * total / 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hot_prefix_never_loads_an_instance_above_the_bound(temperature: float) -> None:
    """The worst case: all requests have the prefix, only one instance ever caches it, and no request ends."""
    weights = KvWeights(temperature=temperature)
    members, policy = fleet(10), KvAware(Random(5), weights)
    for _ in range(3000):
        chosen = choose(policy, RouteRequest(10_000), members, {"i0004": 9_990}).member
        give(chosen, 10 if chosen.instance_id == "i0004" else 10_000)
        mean = sum(m.running for m in members) / 10
        mean_queued = sum(m.queued_tokens for m in members) / 10
        assert max(m.running for m in members) <= 2 * mean + weights.spill_requests + 1
        assert max(m.queued_tokens for m in members) <= 2 * mean_queued + weights.spill_tokens + 10_000
    hot = members[4].running
    assert hot > 1.5 * max(m.running for m in members if m is not members[4])  # but it is used


def test_kv_aware_goes_to_the_cache_while_that_is_less_work_than_elsewhere() -> None:
    members, policy = fleet(4), KvAware(Random(0), KvWeights(near=0, crowd_tokens=math.inf))
    ask, cached = RouteRequest(4000), {"i0002": 3000}
    assert choose(policy, ask, members, cached).member is members[2]
    members[2].queued_tokens = 5990  # half of which goes first
    assert choose(policy, ask, members, cached).member is members[2]
    members[2].queued_tokens = 6010
    assert choose(policy, ask, members, cached).member is not members[2]
    half = KvAware(Random(0), KvWeights(cached=0.5, near=0, crowd_tokens=math.inf))
    members[2].queued_tokens = 3010
    assert choose(half, ask, members, cached).member is not members[2]
    assert choose(policy, ask, members, cached).member is members[2]


def test_the_longer_all_queues_the_longer_the_queue_at_the_cache_may_be() -> None:
    """3,000 tokens are cached there, which count 1, 2 and 5 times; half of a queue counts."""
    for usual, more in ((0, 6000), (16_384, 12_000), (65_536, 30_000)):
        members, policy = fleet(100), KvAware(Random(0), KvWeights(near=0, spill=1e9))
        for member in members:
            member.queued_tokens = usual
        for queued, is_there in ((more - 200, True), (more + 200, False)):
            members[2].queued_tokens = usual + queued
            chosen = choose(policy, RouteRequest(4000), members, {"i0002": 3000}).member
            assert (chosen is members[2]) == is_there


def test_reported_speeds_count_within_a_range_only() -> None:
    members, policy = fleet(6), KvAware(Random(0), KvWeights(spill=1e9))
    for member, speed in zip(members, [1000.0, 1300.0, 800.0, 320.0, 1e12, 1e-3], strict=True):
        member.prompt_tokens_per_s = speed
    for _ in range(4000):
        give(choose(policy, RouteRequest(1000), members).member, 1000)
    usual, usual_too, usual_as_well, slow, boasts, moans = (member.running for member in members)
    assert usual_too == pytest.approx(usual, rel=0.05)
    assert usual_as_well == pytest.approx(usual, rel=0.05)
    assert slow == pytest.approx(usual * 0.4, rel=0.05)
    assert boasts == pytest.approx(usual * SPEED_RANGE, rel=0.05)
    assert moans == pytest.approx(usual / SPEED_RANGE, rel=0.05)


def test_temperature_makes_the_worse_choice_e_times_less_likely_for_a_prompt_of_cost() -> None:
    members, policy = fleet(2), KvAware(Random(6), KvWeights(temperature=0.5))
    members[1].queued_tokens = 1000  # half of it counts: half a prompt of 1000, one temperature
    found = Counter(choose(policy, RouteRequest(1000), members).member.instance_id for _ in range(5000))
    assert found["i0000"] / found["i0001"] == pytest.approx(math.e, rel=0.1)


def test_instances_with_nearly_equal_costs_get_equal_shares() -> None:
    """Conversations begin while all workers are nearly idle, and must not go to one instance."""
    members, policy = fleet(4), KvAware(Random(2))
    for at, member in enumerate(members):
        member.queued_tokens = at  # of prompts of 100 to 300 tokens: nothing
        member.prompt_tokens_per_s = 1000.0 + at * 200
    given: Counter[str] = Counter()
    draw = Random(3)
    for at in range(40):
        tokens = draw.randrange(100, 300)
        choice = policy.choose(RouteRequest(tokens), members, {}, at * 0.1)
        given[choice.member.instance_id] += tokens
    assert max(given.values()) <= 1.15 * min(given.values())


def test_given_tokens_are_forgotten_and_dry_requests_do_not_count() -> None:
    members, policy = fleet(2), KvAware(Random(2))

    def take(cached: dict[str, int], now_s: float, *, dry: bool = False) -> str:
        choice = policy.choose(RouteRequest(1000, dry=dry), members, cached, now_s)
        return choice.member.instance_id

    hot = {"i0001": 900}
    assert [take({}, 0.0, dry=True) for _ in range(64)].count("i0000") not in {0, 64}, "drawn, as nothing was given"
    assert [take(hot, 0.0) for _ in range(12)] == ["i0001"] * 12  # 1,200 tokens
    assert take({}, 1.0) == "i0000"
    assert take({}, 1.0) == "i0000", "one that has computed 1,000 is behind one with 1,200"
    assert take({}, 1.0) == "i0001"
    assert [take({}, 1e6), take({}, 1e6)].count("i0000") == 1, "all of that is forgotten, in numbers too"


# cache_aware


@pytest.mark.parametrize(
    ("busy", "idle", "cached", "to_the_cache"),
    [
        (64, 0, 900, True),  # no more than 64 apart
        (65, 0, 900, False),
        (300, 200, 900, True),  # no more than 1.5 times
        (301, 200, 900, False),
        (10, 0, 300, False),  # no more than 0.3 of the prompt
        (10, 0, 301, True),
    ],
)
def test_cache_aware_switches_at_its_thresholds(busy: int, idle: int, cached: int, to_the_cache: bool) -> None:
    members = fleet(3)
    members[0].running, members[1].running, members[2].running = busy, idle, idle + 1
    chosen = choose(CacheAware(Random(0)), RouteRequest(1000), members, {"i0000": cached}).member
    assert chosen is members[0 if to_the_cache else 1]


def test_cache_aware_takes_the_longest_prefix_and_of_equal_ones_the_less_loaded() -> None:
    members = fleet(4)
    members[1].running, members[2].running = 5, 3
    cached = {"i0000": 400, "i0001": 800, "i0002": 800}
    assert choose(CacheAware(Random(0)), RouteRequest(1000), members, cached).member is members[2]
    assert choose(CacheAware(Random(0)), RouteRequest(1000), members[:2], cached).member is members[1]


# hashing


def owners(members: Sequence[Member], keys: int) -> list[str]:
    policy = BoundedHashing(Random(0), requests_of, session_or_prefix, "next")
    return [choose(policy, RouteRequest(1, session=f"user {at}"), members).member.instance_id for at in range(keys)]


def test_a_key_moves_only_when_its_instance_goes_and_only_to_one_that_comes() -> None:
    members, keys = fleet(20), 4000
    before = owners(members, keys)
    shares = Counter(before)
    assert len(shares) == 20
    assert all(abs(share - 200) < 5 * math.sqrt(200) for share in shares.values())
    fewer = owners([m for m in members if m.instance_id != "i0007"], keys)
    assert all(now == was for was, now in zip(before, fewer, strict=True) if was != "i0007")
    heirs = Counter(now for was, now in zip(before, fewer, strict=True) if was == "i0007")
    assert len(heirs) == 19
    more = owners([*members, Member("new")], keys)
    moved = [now for was, now in zip(before, more, strict=True) if was != now]
    assert set(moved) == {"new"}
    assert len(moved) == pytest.approx(keys / 21, rel=0.35)


def test_scores_do_not_depend_on_process_or_company() -> None:
    """Routers must agree without messages: the scores are part of the protocol."""
    assert Rendezvous().scores(b"key", [Member("a"), Member("b")]) == [3267134792968014736, 2951011398347298314]


@pytest.mark.parametrize("instead", ["next", "least_load"])
def test_one_hot_key_fills_no_instance_above_the_bound(instead: str) -> None:
    policy = BoundedHashing(Random(0), prompt_load, session_or_prefix, instead)
    members = fleet(10)
    for at in range(2000):
        give(choose(policy, RouteRequest(500, session="hot"), members).member, 500)
        loads = [prompt_load(m, 0) for m in members]
        assert max(loads) <= LOAD_FACTOR * sum(loads) / 10 + SLACK_TOKENS + 500 + REQUEST_TOKENS, at
    assert min(m.running for m in members) < 200 < max(m.running for m in members)


def test_a_key_stays_while_its_instance_has_room_and_goes_where_it_would_go_without_it_when_not() -> None:
    members = fleet(6)
    policy = BoundedHashing(Random(0), prompt_load, prefix_only, "next")
    home = choose(policy, RouteRequest(10, prefix=b"p"), members).member
    home.queued_tokens = SLACK_TOKENS  # all others are idle
    assert all(
        choose(policy, RouteRequest(10, prefix=b"p", session=str(at)), members).member is home for at in range(20)
    )
    home.queued_tokens = 2 * SLACK_TOKENS
    others = [m for m in members if m is not home]
    substitutes = set()
    for at in range(400):
        ask = RouteRequest(10, prefix=b"%d" % at)
        substitute = choose(policy, ask, members).member
        assert substitute is choose(policy, ask, others).member
        substitutes.add(substitute.instance_id)
    assert len(substitutes) == 5


def test_a_key_has_an_instance_though_rounding_puts_all_loads_above_the_mean() -> None:
    """The maximum of no instance raised ValueError, which failed the request."""
    policy = parse_policy("consistent_hashing@load_factor=1,slack_tokens=0").make("decode", Random(0))
    for count in range(2, 12):
        for running in range(1, 40):
            members = [Member(f"i{i:02}", running=running, devices=5) for i in range(count)]
            policy.choose(RouteRequest(10, session="s"), members, {}, 0.0)


def test_a_prefix_whose_instance_is_too_full_or_a_request_without_one_goes_to_the_least_loaded() -> None:
    members = fleet(6)
    policy = BoundedHashing(Random(0), prompt_load, prefix_only, "least_load")
    home = choose(policy, RouteRequest(10, prefix=b"p"), members).member
    home.queued_tokens = 2 * SLACK_TOKENS
    drawn = {choose(policy, RouteRequest(10, prefix=b"p"), members).member.instance_id for _ in range(100)}
    assert len(drawn) == 5
    assert choose(policy, RouteRequest(10, session="no prefix"), members).why == "least load: no key"


def test_names_of_instances_that_are_gone_are_forgotten() -> None:
    rendezvous = Rendezvous()
    for at in range(500):
        rendezvous.scores(b"key", [Member(f"{at}-{i}") for i in range(4)])
    assert len(rendezvous._names) <= 12


# bucket


def test_buckets_have_as_many_tokens_each_and_the_short_do_not_meet_the_long() -> None:
    rng, policy, members = Random(7), Bucket(Random(8), prompt_load), fleet(6)
    lengths = [int(rng.lognormvariate(6, 1.2)) + 1 for _ in range(LEARN_INTERVAL_PROMPTS * 40)]
    for length in lengths[: LEARN_INTERVAL_PROMPTS * 16]:
        choose(policy, RouteRequest(length), members)
    tokens: Counter[str] = Counter()
    seen: dict[str, list[int]] = {m.instance_id: [] for m in members}
    for length in lengths[LEARN_INTERVAL_PROMPTS * 16 :]:
        chosen = choose(policy, RouteRequest(length), members).member.instance_id
        tokens[chosen] += length
        seen[chosen].append(length)
    mean = sum(tokens.values()) / 6
    assert all(0.7 * mean < tokens[m.instance_id] < 1.3 * mean for m in members)
    for shorter, longer in zip(members, members[2:], strict=False):  # neighbours share a moving boundary
        assert max(seen[shorter.instance_id]) < 1.5 * min(seen[longer.instance_id])


def test_prompts_of_one_length_use_all_buckets() -> None:
    policy, members = Bucket(Random(8), prompt_load), fleet(5)
    found = Counter(choose(policy, RouteRequest(100), members).member.instance_id for _ in range(2000))
    assert all(320 < count < 480 for count in found.values())


def test_buckets_give_way_to_the_least_load_when_the_fleet_is_unbalanced() -> None:
    policy, members = Bucket(Random(8), prompt_load), fleet(3)
    for at in range(LEARN_INTERVAL_PROMPTS):
        choose(policy, RouteRequest(1 + at), members)
    assert choose(policy, RouteRequest(1), members).member is members[0]
    members[0].queued_tokens, members[1].queued_tokens = 16385, 10
    assert choose(policy, RouteRequest(1), members).member is members[2]
    members[0].queued_tokens = 16384
    assert choose(policy, RouteRequest(1), members).member is members[0]


# session affinity


def test_a_session_stays_until_its_instance_is_gone_or_too_full() -> None:
    members = fleet(5)
    policy = SessionAffinity(LeastLoad(Random(1), prompt_load), prompt_load)
    ask = RouteRequest(100, session="s")
    home = choose(policy, ask, members).member
    home.queued_tokens = SPILL_TOKENS
    assert all(choose(policy, ask, [*members, Member(f"new{at}")]).member is home for at in range(9))
    without = [m for m in members if m is not home]
    second = choose(policy, ask, without).member
    assert choose(policy, ask, members).member is second  # it has the cache now
    second.queued_tokens = 10**6
    assert choose(policy, ask, members).member not in (home, second)


def test_sessions_are_forgotten_when_idle_and_never_more_than_so_many() -> None:
    members = fleet(3)
    policy = SessionAffinity(RandomChoice(Random(1)), prompt_load, idle_s=10, sessions=50)
    used = []
    for at in range(500):
        policy.choose(RouteRequest(1, session=str(at)), members, {}, 0.0)
        assert len(policy) <= 51
        if at % 10 == 0:
            used.append(choose(policy, RouteRequest(1, session="in use"), members).member)
    assert all(member is used[0] for member in used)
    policy.choose(RouteRequest(1, session="last"), members, {}, 30.0)
    assert len(policy) == 1
    policy.choose(RouteRequest(1), members, {}, 30.0)
    assert len(policy) == 1


@pytest.mark.parametrize(
    ("text", "role", "options"),
    [
        ("kv_aware", "prefill", {}),
        ("kv_aware@temperature=0.5,queued=1", "prefill", {"temperature": 0.5, "queued": 1.0}),
        ("least_load@overlap=0", "decode", {"overlap": 0.0}),
        ("cache_aware@balance_rel_threshold=2", "prefill", {"balance_rel_threshold": 2.0}),
        ("consistent_hashing@load_factor=1.5,slack_tokens=0", "decode", {"load_factor": 1.5, "slack_tokens": 0.0}),
        ("bucket@balance_rel=3", "prefill", {"balance_rel": 3.0}),
        ("session_affinity@idle_s=60", "decode", {"idle_s": 60.0}),
    ],
)
def test_a_policy_is_named_with_options(text: str, role: WorkerRole, options: dict[str, float]) -> None:
    spec = parse_policy(text)
    assert (spec.name, spec.options) == (text.partition("@")[0], options)
    policy = spec.make(role, Random(0))
    policy.choose(RouteRequest(10, session="s", prefix=b"p"), fleet(3), {}, 0.0)
    if "temperature" in options:
        assert policy._weights == KvWeights(temperature=0.5, queued=1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fastest", "is not one of round_robin"),
        ("round_robin@turns=2", "round_robin has no option 'turns': it has none"),
        ("kv_aware@heat=1", "it has cached, queued, temperature"),
        ("kv_aware@temperature", "OPTION=NUMBER"),
        ("kv_aware@temperature=hot", "OPTION=NUMBER"),
        ("kv_aware@temperature=nan", "from 0 to"),
        ("kv_aware@temperature=-1", "from 0 to"),
        ("kv_aware@temperature=inf", "from 0 to"),
        ("kv_aware@queued=1e10", "from 0 to"),
        ("prefix_hash@load_factor=0.5", "below 1"),
    ],
)
def test_an_unknown_policy_or_option_is_refused_with_the_known_ones(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_policy(text)


def test_kv_events_are_followed_if_the_policy_uses_caches() -> None:
    assert parse_policy("least_load").uses_caches("decode")
    assert not parse_policy("least_load@overlap=0").uses_caches("decode")
    assert parse_policy("least_load@overlap=1").uses_caches("prefill")
    assert parse_policy("session_affinity@idle_s=60").uses_caches("decode")
    assert not parse_policy("power_of_two").uses_caches("prefill")
