from collections.abc import Mapping, Set
from enum import StrEnum
from itertools import product

import pytest

from components.errors import IllegalTransition, InvariantBroken
from components.kv_transfer import receiver, sender
from components.kv_transfer.receiver import ReceiveState
from components.kv_transfer.sender import SendState
from components.lifecycle import Lifecycle
from services.bootstrap import rooms
from services.bootstrap.rooms import RoomState

TABLES: dict[type[StrEnum], Mapping[StrEnum, Set[StrEnum]]] = {
    ReceiveState: receiver.NEXT,
    SendState: sender.NEXT,
    RoomState: rooms.NEXT,
}
PAIRS = [(states, one, other) for states in TABLES for one, other in product(states, states)]


@pytest.mark.parametrize(("states", "one", "other"), PAIRS)
def test_a_state_moves_where_its_table_says_and_nowhere_else(
    states: type[StrEnum], one: StrEnum, other: StrEnum
) -> None:
    lifecycle = Lifecycle("thing", TABLES[states], one)
    if other in TABLES[states].get(one, ()):
        lifecycle.advance(other)
        assert lifecycle.state is other
    else:
        with pytest.raises(IllegalTransition, match=f"thing: {one} → {other}"):
            lifecycle.advance(other)
        assert lifecycle.state is one
    assert issubclass(IllegalTransition, InvariantBroken)


@pytest.mark.parametrize("states", TABLES)
def test_every_state_is_reached_and_reaches_an_end(states: type[StrEnum]) -> None:
    table, start = TABLES[states], next(iter(states))
    reached, pending = {start}, [start]
    while pending:
        for following in table.get(pending.pop(), frozenset()) - reached:
            reached.add(following)
            pending.append(following)
    assert reached == set(states)
    ends = {s for s in states if s not in table}
    assert ends
    assert all(Lifecycle("thing", table, s).is_over == (s in ends) for s in states)
    for state in states:
        ahead, pending = {state}, [state]
        while pending:
            for following in table.get(pending.pop(), frozenset()) - ahead:
                ahead.add(following)
                pending.append(following)
        assert ahead & ends, f"{state} never ends"


def test_a_receive_whose_pages_are_known_to_prefill_never_closes_without_being_pinned() -> None:
    assert receiver.NEXT[ReceiveState.TRANSFERRING] == {ReceiveState.DONE, ReceiveState.PINNED}
    assert receiver.NEXT[ReceiveState.PINNED] == {ReceiveState.CLOSED}
