"""make outages: clients notice nothing while etcd is away for longer than any time limit. It takes 17 minutes."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.mesh.outage_mesh import (
    STEP_S,
    Outage,
    OutageMesh,
    a_decode_cut_off,
    a_follower_frozen,
    all_etcd_frozen,
    all_etcd_killed,
    etcd_data_lost,
    no_quorum,
    outage_mesh,
    the_leader_frozen,
)
from tests.mesh.preloaded import Preloaded

MINUTE_S: Final = 60.0
STREAM_TOKENS: Final = int(2 * MINUTE_S / STEP_S)
OUTAGES: Final = [
    Outage("all of etcd freezes for 70 s", all_etcd_frozen, 70.0),
    Outage("an etcd follower freezes for a minute", a_follower_frozen, MINUTE_S),
    Outage("the etcd leader freezes for a minute", the_leader_frozen, MINUTE_S),
    Outage("etcd has no quorum for a minute", no_quorum, MINUTE_S),
    Outage("a decode is cut off from etcd for a minute", a_decode_cut_off, MINUTE_S),
    Outage("etcd loses its data and is away for a minute", etcd_data_lost, MINUTE_S),
    Outage("etcd is away for ten minutes", all_etcd_killed, 10 * MINUTE_S),
]
pytestmark = [pytest.mark.mesh, pytest.mark.outages, pytest.mark.timeout(15 * MINUTE_S)]


@pytest.fixture(scope="module")
def mesh(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutageMesh]:
    """A mesh with streams of two minutes."""
    with outage_mesh(preloaded, tmp_path_factory.mktemp("outages"), STREAM_TOKENS) as under_load:
        yield under_load


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
def test_clients_notice_nothing_when(outage: Outage, mesh: OutageMesh) -> None:
    seen = outage.happen(mesh)
    assert not [*outage.faults(seen), *outage.exceeded(seen)]
