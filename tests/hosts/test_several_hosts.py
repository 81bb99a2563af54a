"""A mesh on several hosts: answers, listeners, and faults of each host's link under load."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import pytest

from components.kv_transfer.open_sockets import listeners
from tests.hosts.hosts import CUT, WHOLE, Fault, Hosts
from tests.hosts.mesh import FAULTY, HostMesh, sent_bytes
from tests.mesh.outage_load import PROMPT_TOKENS, Load
from tests.mesh.outage_mesh import pages

pytestmark = [pytest.mark.hosts, pytest.mark.mesh]

STREAM_TOKENS: Final = 500  # 20 s
PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 8 << 10  # of tests.mesh.mocks.SHAPE
LASTS_S: Final = 6.0
AFTER_S: Final = 3.0
HEALED_S: Final = 2.0
HEALED_WINDOWS: Final = 6  # a circuit breaker whose trial failed is open for 10 s more


@dataclass(frozen=True, slots=True)
class LinkFault:
    name: str
    into: Fault
    out: Fault
    lasts_s: float = LASTS_S

    def __str__(self) -> str:
        return self.name


SLOW: Final = Fault(delay_s=0.02)
LOSSY: Final = Fault(loss=0.02)
NARROW: Final = Fault(bytes_per_s=1e6)
LINK_FAULTS: Final = [
    LinkFault("40 ms of delay", SLOW, SLOW),
    LinkFault("2 percent of frames lost", LOSSY, LOSSY),
    LinkFault("1 MB a second", NARROW, NARROW),
    LinkFault("nothing comes in", CUT, WHOLE),
    LinkFault("nothing goes out", WHOLE, CUT),
    LinkFault("cut off", CUT, CUT),
]
LONG: Final = LinkFault("cut off for 25 s", CUT, CUT, lasts_s=25.0)
CASES: Final = [
    *((host, fault) for host in FAULTY for fault in LINK_FAULTS),
    ("prefill", LONG),
    ("decode", LONG),
]


@pytest.fixture(scope="module")
def load(host_mesh: HostMesh) -> Iterator[Load]:
    frontend = host_mesh.one("frontend")
    under = Load(host_mesh.home, repeat(frontend.url), [frontend.log], STREAM_TOKENS)
    under.prefills, under.decodes = (pages(host_mesh.etcd_url, role) for role in ("prefill", "decode"))
    with under:
        yield under


def test_answers_are_right_and_kv_crosses_the_network(load: Load, hosts: Hosts) -> None:
    load.until_calm()
    before = sent_bytes(hosts["prefill"])
    with load.window() as seen:
        time.sleep(3)
    assert sent_bytes(hosts["prefill"]) - before > seen.answered * PROMPT_TOKENS // PAGE_TOKENS * PAGE_BYTES
    print(f"\nundisturbed: {seen}")  # noqa: T201
    assert seen.answered
    assert (seen.failed, seen.wrong, seen.moves) == ([], [], [])
    assert seen.at_decode == 0
    assert seen.at_prefill >= PROMPT_TOKENS * seen.answered


def test_every_process_listens_on_the_network_of_the_mesh_alone(host_mesh: HostMesh, hosts: Hosts, load: Load) -> None:
    load.until_calm()  # connections for KV exist
    allowed = {host.address for host in hosts.all.values()} | {"127.0.0.1"}
    for worker in host_mesh.workers:
        open_ports = listeners(worker.popen.pid)
        assert open_ports or worker.role == "planner", f"{worker.role} has no metrics page"
        assert {str(listener.address) for listener in open_ports} <= allowed, worker.role


@pytest.mark.parametrize(("host", "fault"), CASES, ids=str)
def test_no_request_fails_while_a_link_is_faulty(host: str, fault: LinkFault, hosts: Hosts, load: Load) -> None:
    load.until_calm()
    with load.window() as seen:
        hosts.fault(host, into=fault.into, out=fault.out)
        time.sleep(fault.lasts_s)
        hosts.fault(host)
        time.sleep(AFTER_S)
    print(f"\n{host}: {fault}: {seen}")  # noqa: T201
    assert seen.failed == []
    assert seen.wrong == []
    assert seen.answered
    for _ in range(HEALED_WINDOWS):
        load.until_calm()
        with load.window() as healed:
            time.sleep(HEALED_S)
        print(f"healed: {healed}")  # noqa: T201
        assert (healed.failed, healed.wrong) == ([], [])
        if not healed.at_decode:
            break
    assert healed.at_decode == 0, "prefill cannot write into decode's pages any more"
