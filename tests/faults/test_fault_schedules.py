"""Every fault at every message, write and state, and mixtures: right tokens or one clear error, and nothing is kept."""

from pathlib import Path

import pytest

from components.kv_transfer.receiver import ReceiveState
from components.kv_transfer.sender import SendState
from services.bootstrap.rooms import RoomState
from services.decode.streams import DecodeState
from services.prefill.jobs import PrefillState
from tests.faults.faults import Do, Fault
from tests.faults.limits import Limit, limit_of
from tests.faults.mesh_run import Outcome, check
from tests.faults.schedules import Schedule, conditions, mixture, named, of_messages, of_states, of_writes
from tests.faults.setup import any_setup

SAME_MOMENT = {"receive transferring", "send done"}  # as decode transfer, as prefill done
FAULTS = 900  # at least so many are injected here
MIXTURES = 45
TOGETHER = Limit(1.0, failed=2, moves=2)  # that faults at once cost beyond what each costs alone


def _all_fire(home: Path, schedule: Schedule) -> Outcome:
    seed, changes = conditions(schedule)
    outcome = check(home, seed, schedule, **changes)
    assert set(outcome.fired) == set(schedule), f"seed {seed}: not all of {named(schedule)}"
    return outcome


@pytest.mark.parametrize("schedule", [*of_messages()], ids=named)
def test_a_message_goes_wrong(home: Path, schedule: list[Fault]) -> None:
    outcome = _all_fire(home, schedule)
    if schedule[-1].do is Do.DUPLICATE:
        assert not any(client.error for client in outcome.clients), "whoever hears a thing twice does it once"


@pytest.mark.parametrize("schedule", [*of_writes()], ids=named)
def test_a_write_goes_wrong(home: Path, schedule: list[Fault]) -> None:
    outcome = _all_fire(home, schedule)
    if schedule[0].do is Do.WRITE_CORRUPT:
        assert outcome.counts["kv_transfers_corrupt_total"] == 1


@pytest.mark.parametrize("schedule", [*of_states()], ids=named)
def test_somebody_fails_in_a_state(home: Path, schedule: list[Fault]) -> None:
    _all_fire(home, schedule)


@pytest.mark.parametrize("seed", range(MIXTURES))
def test_much_goes_wrong_at_once(home: Path, seed: int) -> None:
    schedule = mixture(seed)
    limit = Limit(*map(sum, zip(limit_of(schedule), TOGETHER, strict=True)))
    assert check(home, seed, schedule, setup=any_setup(seed, schedule), limit=limit).fired


def test_no_state_of_a_lifecycle_is_left_out() -> None:
    tables = {
        "decode": DecodeState,
        "prefill": PrefillState,
        "receive": ReceiveState,
        "send": SendState,
        "room": RoomState,
    }
    tried = {fault.at for schedule in of_states() for fault in schedule}
    first = {f"{name} {next(iter(states))}" for name, states in tables.items()}  # nothing moves there
    assert {f"{name} {state}" for name, states in tables.items() for state in states} - first <= tried | SAME_MOMENT


def test_enough_is_tried() -> None:
    """Each of these is seen to happen in its own test."""
    assert sum(len(schedule) for schedules in (of_messages, of_writes, of_states) for schedule in schedules()) >= FAULTS
