"""Processes whose wall clocks are an hour off."""

from pathlib import Path

import pytest

from components.messaging.clocks import PeerClocks
from components.wire.codec import Dated
from tests.faults.mesh_run import check, run_faults

HOUR_S = 3600.0
COUNTS = {"frontend": 1, "decode": 2, "prefill": 2, "bootstrap": 1}


@pytest.mark.parametrize("role", ["frontend", "decode", "prefill", "bootstrap"])
@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_an_hour_of_skew_is_noticed_by_no_request(home: Path, role: str, skew_s: float) -> None:
    """Decode refused every request, each transfer failed, or each room expired."""
    outcome = check(home, 5, [], num_clients=40, over_s=12.0, counts=COUNTS, skews_s={role: skew_s})
    assert [client.error for client in outcome.clients] == [None] * 40
    assert not outcome.counts["failures"]
    assert not outcome.counts["recomputes"]


def test_without_conversion_an_hour_of_skew_is_noticed(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """So the test above can fail."""

    def as_it_is(_: PeerClocks, message: Dated) -> Dated:
        return message

    monkeypatch.setattr(PeerClocks, "converted", as_it_is)
    outcome = run_faults(home, 5, [], num_clients=10, over_s=1.0, counts=COUNTS, skews_s={"prefill": HOUR_S})
    assert outcome.counts["recomputes"]
