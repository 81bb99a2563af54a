from collections.abc import Mapping, Set
from enum import StrEnum
from itertools import product

import pytest

from components.errors import IllegalTransition, InvariantBroken
from components.lifecycle import Lifecycle, Tally
from services.decode import inbound, requests
from services.decode.inbound import InboundState
from services.decode.requests import RequestState
from services.prefill import outbound
from services.prefill.outbound import OutboundState

TABLES: dict[type[StrEnum], Mapping[StrEnum, Set[StrEnum]]] = {
    InboundState: inbound.NEXT,
    OutboundState: outbound.NEXT,
    RequestState: requests.NEXT,
}
PAIRS = [(states, one, other) for states in TABLES for one, other in product(states, states)]


@pytest.mark.parametrize(("states", "one", "other"), PAIRS)
def test_a_state_changes_only_along_its_table(states: type[StrEnum], one: StrEnum, other: StrEnum) -> None:
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


@pytest.mark.parametrize("states", TABLES)
def test_a_tally_counts_each_state_that_is_not_terminal(states: type[StrEnum]) -> None:
    table, start = TABLES[states], next(iter(states))
    tally = Tally(table)
    assert tally.states == list(table)
    assert not any(tally[state] for state in states)
    things = [Lifecycle("thing", table, start, tally) for _ in range(3)]
    assert tally[start] == 3
    for thing in things:
        while not thing.is_over:
            thing.advance(min(table[thing.state], key=list(states).index))
            counted = {state: tally[state] for state in table}
            assert counted == {s: sum(t.state is s for t in things) for s in table}
    assert not any(tally[state] for state in states)


def test_a_transfer_whose_pages_prefill_knows_is_never_closed_without_being_pinned() -> None:
    assert inbound.NEXT[InboundState.TRANSFER] == {InboundState.LANDED, InboundState.PINNED}
    assert inbound.NEXT[InboundState.PINNED] == {InboundState.CLOSED}
