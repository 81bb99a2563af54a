"""Every fault at every message, write and state, and mixtures: right tokens or one clear error, and nothing is kept."""

from pathlib import Path

import pytest

from tests.faults.faults import Fault
from tests.faults.mesh_run import check
from tests.faults.schedules import Schedule, mixture, of_messages, of_states, of_writes

FAULTS = 500  # at least so many are injected here
MIXTURES = 60


def _named(schedule: Schedule) -> str:
    return " then ".join(str(fault) for fault in schedule)


def _all_fire(home: Path, schedule: Schedule) -> None:
    seed = sum(map(ord, _named(schedule)))
    assert set(check(home, seed, schedule).fired) == set(schedule), f"seed {seed}: not all of {_named(schedule)}"


@pytest.mark.parametrize("schedule", [*of_messages()], ids=_named)
def test_a_message_goes_wrong(tmp_path: Path, schedule: list[Fault]) -> None:
    _all_fire(tmp_path, schedule)


@pytest.mark.parametrize("schedule", [*of_writes()], ids=_named)
def test_a_write_goes_wrong(tmp_path: Path, schedule: list[Fault]) -> None:
    _all_fire(tmp_path, schedule)


@pytest.mark.parametrize("schedule", [*of_states()], ids=_named)
def test_somebody_fails_in_a_state(tmp_path: Path, schedule: list[Fault]) -> None:
    _all_fire(tmp_path, schedule)


@pytest.mark.parametrize("seed", range(MIXTURES))
def test_much_goes_wrong_at_once(tmp_path: Path, seed: int) -> None:
    assert check(tmp_path, seed, mixture(seed)).fired


def test_enough_is_tried() -> None:
    """Each of these is seen to happen in its own test."""
    assert sum(len(schedule) for schedules in (of_messages, of_writes, of_states) for schedule in schedules()) >= FAULTS
