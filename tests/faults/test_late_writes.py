"""A write lands after its transfer was given up: its pages must not belong to another request by then."""

from pathlib import Path
from typing import Any, Final

import pytest

from components.wire.prefill import Quiesce
from services.decode.inbound import InboundTransfer
from services.decode.prefill_client import PrefillClient
from tests.faults.faults import Do, Fault
from tests.faults.mesh_run import check, run_faults
from tests.faults.setup import EQUAL, LARGE_TO_SMALL, SMALL_TO_LARGE, Setup

SOON_S, LATE_S, TOO_LATE_S = 0.01, 2.0, 10.0  # the last is longer than a transfer may take
SIZES: Final = {1: SMALL_TO_LARGE, 2: LARGE_TO_SMALL, 3: EQUAL}  # by seed
THEN: Final = {"at": "write pages", "after_s": SOON_S}
# The write belongs to one of the first two clients.
CLIENTS_GO: Final = [Fault(Do.CLIENT_GONE, **THEN), Fault(Do.CLIENT_GONE, **THEN)]

# how late the first write is, and the faults that end its transfer
WAYS: Final = {
    "the clients go": (LATE_S, CLIENTS_GO),
    "the clients go, prefill stops and goes on writing": (
        LATE_S,
        [Fault(Do.STOP, "write pages", amount=4.0, role="prefill", after_s=2 * SOON_S), *CLIENTS_GO],
    ),
    "prefill is declared lost and goes on writing": (LATE_S, [Fault(Do.STOP, amount=4.0, role="prefill", **THEN)]),
    "prefill stops for longer than its lease and goes on writing": (
        LATE_S,
        [Fault(Do.STOP, amount=9.0, role="prefill", **THEN)],
    ),
    "prefill is killed, its last bytes are on the way": (2 * LATE_S, [Fault(Do.KILL, role="prefill", **THEN)]),
    "the transfer takes too long": (TOO_LATE_S, []),
}


class FreesAtOnce(PrefillClient):
    """Frees pages without a quiesce."""

    async def _until_quiet(self, transfer: InboundTransfer, quiesce: Quiesce) -> None:
        return


def _run(way: str, seed: int) -> tuple[list[Fault], dict[str, Any]]:
    """Make a schedule, and arguments with enough clients that every page is reused soon."""
    late_s, faults = WAYS[way]
    counts = {"frontend": 1, "decode": 1, "prefill": 1, "bootstrap": 1}
    over_s = max([late_s, *(fault.amount for fault in faults)]) + 1.0
    return [Fault(Do.WRITE_LATE, "write pages", amount=late_s), *faults], {
        "counts": counts,
        "num_clients": int(12 * over_s),
        "over_s": over_s,
        "setup": Setup(page_sizes=SIZES[seed]),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", SIZES)
def test_a_late_write_hits_nobody(home: Path, seed: int, way: str) -> None:
    schedule, mesh = _run(way, seed)
    outcome = check(home, seed, schedule, **mesh)
    assert set(outcome.fired) == set(schedule)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.faults) for seed in SIZES if seed > 1)])
def test_an_implementation_that_frees_pages_at_once_is_caught(home: Path, seed: int, way: str) -> None:
    schedule, mesh = _run(way, seed)
    outcome = run_faults(home, seed, schedule, **mesh, prefill_client=FreesAtOnce)
    assert outcome.problems, "pages were freed under a write, and nothing showed it"
