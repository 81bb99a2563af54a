from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from components.routing.policy import Member, RoundRobin, RouteRequest


def chosen(policy: RoundRobin, ids: Iterable[str]) -> str:
    return policy.choose(RouteRequest(1), [Member(i) for i in sorted(ids)], {}, 0.0).member.instance_id


def test_each_gets_its_turn() -> None:
    policy = RoundRobin()
    assert [chosen(policy, "abc") for _ in range(6)] == list("abcabc")


def test_a_leave_and_a_join_do_not_disturb_the_turn() -> None:
    policy = RoundRobin()
    assert [chosen(policy, ids) for ids in ("abc", "abc", "ac", "abc", "abcd", "bcd", "bd")] == list("abcabcd")


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=60))
def test_between_two_turns_of_one_instance_every_other_that_stayed_has_had_one(usable: list[set[str]]) -> None:
    policy = RoundRobin()
    turns = [chosen(policy, ids) for ids in usable]
    for start, one in enumerate(turns):
        for end in range(start + 1, len(turns)):
            if turns[end] == one:
                stayed = set.intersection(*usable[start : end + 1])
                assert stayed <= set(turns[start:end])
                break


def test_a_dry_request_takes_no_turn() -> None:
    policy = RoundRobin()
    members = [Member(i) for i in "abc"]
    for _ in range(3):
        assert policy.choose(RouteRequest(1, dry=True), members, {}, 0.0).member.instance_id == "a"
    assert chosen(policy, "abc") == "a"


def test_load_is_even() -> None:
    policy = RoundRobin()
    assert set(Counter(chosen(policy, "abc") for _ in range(300)).values()) == {100}
