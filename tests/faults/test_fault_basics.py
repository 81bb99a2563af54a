"""The harness itself: a run without faults passes, runs are reproducible, and errors are found."""

from pathlib import Path

import pytest

from tests.faults.faults import Do, Fault
from tests.faults.mesh_run import check, run_faults
from tests.faults.schedules import mixture
from tests.faults.setup import Setup, any_setup, varied


@pytest.mark.parametrize("seed", range(3))
def test_without_faults_every_token_is_right_and_nothing_is_kept(home: Path, seed: int) -> None:
    outcome = check(home, seed, [], setup=varied(seed))
    assert not outcome.fired
    assert all(client.error is None for client in outcome.clients)
    assert sum("write of pages" in line for line in outcome.trace) >= 3


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_seed_and_a_schedule_give_the_same_run_again(home: Path, seed: int) -> None:
    first, again = (run_faults(home, seed, mixture(seed), setup=any_setup(seed, mixture(seed))) for _ in range(2))
    assert first.trace == again.trace
    assert first.virtual_s == again.virtual_s


def test_a_page_that_was_never_sent_is_found(home: Path) -> None:
    """Prefill assumes that decode has a page more than it has, which no check of the mesh can detect."""
    lie = Fault(Do.ALTER, "message room-open.v2", field="num_cached_pages", count=9)
    assert any("is named" in problem for problem in run_faults(home, 1, [lie]).problems)


def test_a_failure_prints_what_runs_it_again(home: Path) -> None:
    lie = Fault(Do.ALTER, "message room-open.v2", field="num_cached_pages", count=9)
    with pytest.raises(AssertionError, match="replay: check") as failed:
        check(home, 1, [lie], setup=Setup(page_sizes=(16, 16), adapters="everywhere"))
    call = str(failed.value).splitlines()[0].removeprefix("replay: ")
    with pytest.raises(AssertionError) as replayed:
        eval(call, {"check": check, "Fault": Fault, "Do": Do, "Setup": Setup, "home": home})
    assert str(replayed.value) == str(failed.value)
