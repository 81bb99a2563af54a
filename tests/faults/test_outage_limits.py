"""An outage stays within its limits: the longest silence, failed answers, moves from healthy instances."""

import fnmatch
from pathlib import Path
from typing import Final

import pytest

from tests.faults.faults import Do, Fault
from tests.faults.limits import ANYTHING, LIMITS, Limit, row_of
from tests.faults.mesh_run import check, run_faults
from tests.faults.outages import LONG, OUTAGES, Outage
from tests.faults.schedules import REQUEST, of_messages, of_states, of_writes
from tests.faults.setup import PLAIN
from tests.faults.table import row, shown

GENERATE: Final = REQUEST[0]
DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "outages.md"
ALONE: Final = [schedule for schedule in (*of_messages(), *of_writes(), *of_states()) if len(schedule) == 1]
TRIED: Final = {row_of(fault) for (fault,) in ALONE}


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_clients_see_no_more_of_an_outage_than_its_limit(home: Path, outage: Outage, seed: int) -> None:
    outcome = check(home, seed, outage.schedule, limit=outage.limit, **outage.load)
    assert set(outcome.fired) == set(outage.schedule)


def test_the_page_about_outages_has_the_limits_of_the_code() -> None:
    page = DOCS.read_text().splitlines()
    lines = [row(outage.name, outage.limit, outage.setup, None) for outage in OUTAGES]
    lines += [row(shown(pattern), LIMITS[pattern], PLAIN, None) for pattern in TRIED]
    assert not [line for line in lines if not fnmatch.filter(page, line)]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(Do.KILL, "time 1", role="decode"), "a client got nothing for"),
        (Fault(Do.REFUSE, f"message {GENERATE}", field="Rejected"), "1 answers failed, the limit is 0"),
        (
            Fault(Do.REFUSE, f"message {GENERATE}", field="PeerLost"),
            "1 requests moved from decode instances that were well",
        ),
    ],
    ids=str,
)
def test_a_run_beyond_its_limits_fails(home: Path, fault: Fault, words: str) -> None:
    outcome = run_faults(home, 1, [fault], limit=Limit(0.0), **LONG)
    assert any(words in problem for problem in outcome.problems)
    assert not run_faults(home, 1, [fault], limit=ANYTHING, **LONG).problems
