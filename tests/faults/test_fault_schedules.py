"""Every fault at every message, write and state, and mixtures: right tokens or one error, and no leak."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet

from services.decode.inbound import InboundState
from services.decode.requests import RequestState
from services.prefill.outbound import OutboundState
from tests.faults.faults import Do, Fault
from tests.faults.limits import Limit, limit_of, row_of
from tests.faults.mesh_run import Outcome, check
from tests.faults.schedules import Schedule, conditions, mixture, named, of_messages, of_states, of_writes
from tests.faults.setup import any_setup

FAULTS = 900
MIXTURES = 45
TOGETHER = Limit(1.0, failed=2, moves=2)  # that faults together cost beyond their sum
EVERY: Final = 3  # `make test` runs one schedule of so many, and `make faults` all of them


def _thinned(schedules: Iterable[Schedule]) -> Iterator[ParameterSet]:
    """Mark the schedules that only `make faults` runs, but never the first one with a kind of fault."""
    seen: set[str] = set()
    for number, schedule in enumerate(schedules):
        kinds = {row_of(fault) for fault in schedule}
        marks = [pytest.mark.faults] if number % EVERY and kinds <= seen else []
        seen |= kinds
        yield pytest.param(schedule, id=named(schedule), marks=marks)


MESSAGES: Final = [*_thinned(of_messages())]
WRITES: Final = [*_thinned(of_writes())]
STATES: Final = [*_thinned(of_states())]


def _all_fire(home: Path, schedule: Schedule) -> Outcome:
    seed, changes = conditions(schedule)
    outcome = check(home, seed, schedule, **changes)
    assert set(outcome.fired) == set(schedule), f"seed {seed}: not all of {named(schedule)}"
    return outcome


@pytest.mark.parametrize("schedule", MESSAGES)
def test_a_message_goes_wrong(home: Path, schedule: list[Fault]) -> None:
    outcome = _all_fire(home, schedule)
    if schedule[-1].do is Do.DUPLICATE:
        assert not any(client.error for client in outcome.clients), "a message that arrives twice takes effect once"


@pytest.mark.parametrize("schedule", WRITES)
def test_a_write_goes_wrong(home: Path, schedule: list[Fault]) -> None:
    outcome = _all_fire(home, schedule)
    if schedule[0].do is Do.WRITE_CORRUPT:
        assert outcome.counts["corrupt"] == 1


@pytest.mark.parametrize("schedule", STATES)
def test_an_instance_fails_in_each_state(home: Path, schedule: list[Fault]) -> None:
    _all_fire(home, schedule)


@pytest.mark.parametrize("seed", range(MIXTURES))
def test_much_goes_wrong_at_once(home: Path, seed: int) -> None:
    schedule = mixture(seed)
    limit = Limit(*map(sum, zip(limit_of(schedule), TOGETHER, strict=True)))
    assert check(home, seed, schedule, setup=any_setup(seed, schedule), limit=limit).fired


def test_no_state_of_a_lifecycle_is_left_out() -> None:
    tables = {
        "decode": RequestState,
        "prefill": OutboundState,
        "inbound": InboundState,
    }
    tried = {fault.at for schedule in of_states() for fault in schedule}
    first = {f"{name} {next(iter(states))}" for name, states in tables.items()}  # no transition leads there
    assert {f"{name} {state}" for name, states in tables.items() for state in states} - first <= tried


def test_make_test_tries_faults_at_every_message_write_and_state() -> None:
    everything = [*MESSAGES, *WRITES, *STATES]
    tried = {fault.at for param in everything if not param.marks for fault in _faults(param)}
    assert tried == {fault.at for param in everything for fault in _faults(param)}


def _faults(param: ParameterSet) -> Schedule:
    [schedule] = param.values
    assert isinstance(schedule, list)
    return schedule


def test_enough_is_tried() -> None:
    assert sum(len(schedule) for schedules in (of_messages, of_writes, of_states) for schedule in schedules()) >= FAULTS
