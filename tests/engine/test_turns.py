from hypothesis import given
from hypothesis import strategies as st

from engine.ports import OVERTAKEN_TOKENS, OVERTAKERS, turn

priorities, lengths = st.integers(-128, 128), st.integers(0, 10**7)


@given(st.integers(0, 10**6), st.integers(1, 10**4), priorities, priorities, lengths, lengths)
def test_a_request_is_overtaken_no_more_often_than_priority_and_length_allow(
    arrival: int, later: int, priority: int, other_priority: int, length: int, other_length: int
) -> None:
    passed = turn(arrival + later, other_priority, other_length) < turn(arrival, priority, length)
    steps, longer = priority - other_priority, min(length // OVERTAKEN_TOKENS, OVERTAKERS - 1)
    if passed:
        assert later < steps * OVERTAKERS + longer
    elif not other_length:
        assert later >= steps * OVERTAKERS + longer


def test_length_never_makes_up_for_a_step_of_priority() -> None:
    assert turn(0, 0, 10**9) < turn(0, 1, 0)
