from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from components.routing.choice import Ask, Member
from components.routing.policy import RoundRobin
from components.wire.instances import InstanceRecord


def record(instance_id: str) -> InstanceRecord:
    return InstanceRecord(
        instance_id=instance_id, epoch="e", role="decode", host="h", pid=1, started_unix_ms=0, subject="s"
    )


def chosen(policy: RoundRobin, ids: str) -> str:
    found = policy.take([record(i) for i in ids])
    assert found is not None
    return found.instance_id


def test_nobody_usable_means_nobody_chosen() -> None:
    assert RoundRobin().take([]) is None
    assert RoundRobin().choose(Ask(1), [], {}, 0.0) is None


def test_each_gets_its_turn_whatever_the_order_they_are_named_in() -> None:
    policy = RoundRobin()
    assert [chosen(policy, "bca") for _ in range(6)] == list("abcabc")


def test_a_leave_and_a_join_do_not_disturb_the_turn() -> None:
    policy = RoundRobin()
    assert [chosen(policy, ids) for ids in ("abc", "abc", "ac", "abc", "abcd", "bcd", "bd")] == list("abcabcd")


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=60))
def test_between_two_turns_of_one_instance_every_other_that_stayed_has_had_one(usable: list[set[str]]) -> None:
    policy = RoundRobin()
    turns = [chosen(policy, "".join(ids)) for ids in usable]
    for start, one in enumerate(turns):
        for end in range(start + 1, len(turns)):
            if turns[end] == one:
                stayed = set.intersection(*usable[start : end + 1])
                assert stayed <= set(turns[start:end])
                break


def test_as_a_policy_it_takes_the_same_turns() -> None:
    policy = RoundRobin()
    choices = [policy.choose(Ask(1), [Member(i) for i in ids], {}, 0.0) for ids in ("abc", "ac", "abc", "bcd", "bd")]
    assert [c.member.instance_id for c in choices if c is not None] == list("acabd")


def test_load_is_even() -> None:
    policy = RoundRobin()
    assert set(Counter(chosen(policy, "abc") for _ in range(300)).values()) == {100}
