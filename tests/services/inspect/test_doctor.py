"""The findings of `inspect doctor` for made-up facts; each problem has advice."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from msgspec.structs import replace as changed
from nats.js import JetStreamContext

from bench.processes import free_port
from components.credentials import NatsAccess
from components.messaging.connection import connect_bus
from components.messaging.records import Records, RecordsConfig
from components.wire.status import Connection, TransportStatus
from services.inspect import facts as facts_module
from services.inspect.doctor import findings, report
from services.inspect.facts import Facts, Nixl, Segment, Server, SharedMemory, shared_memory
from services.inspect.findings import Finding, Level
from services.inspect.mesh import Seen
from tests.mesh.clusters import NatsCluster
from tests.services.inspect.meshes import nixl, seen, with_ranks
from tests.services.inspect.test_top_view import rendered

NATS = Server("nats://n", version="2", facts={"max_payload": 8 << 20, "jetstream": ""})
HEALTHY = Facts(
    "ns",
    "here",
    etcd=[Server("http://e", version="3")],
    nats=NATS,
    seen=[seen("frontend"), seen("bootstrap"), seen("decode"), seen("prefill")],
    heartbeat_ages_s={"d1": 0.2, "p1": 0.4},
    pages={"f1": "", "d1": ""},
    ports={"f1": ""},
    shm=SharedMemory(100, 90),
    nixl=Nixl(plugins=["UCX"]),
)


def judged(**changes: Any) -> list[Finding]:
    found = findings(replace(HEALTHY, **changes))
    assert all(bool(one.do) == (one.level is not Level.OK) for one in found)
    return [one for one in found if one.level is not Level.OK]


def with_(*others: Seen) -> list[Seen]:
    """Return the healthy mesh, with these instances replaced."""
    ids = {one.instance_id for one in others}
    return [one for one in HEALTHY.seen if one.instance_id not in ids] + list(others)


def test_a_decode_instance_that_drains_beside_another_one_is_only_noted() -> None:
    found = judged(seen=with_(seen("decode", 2, draining=True)))
    assert [(one.level, one.check) for one in found] == [(Level.NOTE, "instances")]


def test_instances_are_checked_while_etcd_is_full() -> None:
    """It can still be read, and the mesh serves."""
    full = Server("http://e", "full", facts={"db_bytes": 1}, do="free space")
    assert [(one.check, one.level) for one in judged(etcd=[full], seen=[])] == [
        ("etcd", Level.WRONG),
        ("instances", Level.WRONG),
    ]


@pytest.mark.anyio
async def test_a_refused_connection_to_nats_is_named() -> None:
    """nats-py retries until the time limit, so `doctor` reported "TimeoutError"."""
    found = await facts_module._nats(f"nats://127.0.0.1:{free_port()}", NatsAccess(), "mesh")
    assert "Connect call failed" in found.error


@pytest.mark.anyio
@pytest.mark.mesh
async def test_without_the_right_to_see_the_stream_jetstream_still_answers(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS does not answer a user with the rights of an earlier release."""

    async def silent(*_: object) -> None:
        raise nats.errors.TimeoutError

    monkeypatch.setattr(JetStreamContext, "stream_info", silent)
    found = await facts_module._nats(nats_url, NatsAccess(), namespace)
    assert (found.error, found.facts["jetstream"]) == ("", "")


@pytest.mark.anyio
@pytest.mark.mesh
async def test_where_stored_responses_are_is_found(nats_url: str, namespace: str, tmp_path: Path) -> None:
    single, name = RecordsConfig(records=1, bytes=10_000, age_s=60), f"{namespace}.responses"
    async with connect_bus(nats_url, "one") as bus:
        await Records(bus, name, single).make()
    found = await facts_module._nats(nats_url, NatsAccess(), namespace)
    assert (found.facts["is_cluster"], found.facts["replicas"]) == (False, 1)
    with NatsCluster(tmp_path, jetstream=True) as cluster:
        async with connect_bus(cluster.url, "one") as bus:
            await Records(bus, name, replace(single, replicas=3)).make()
        found = await facts_module._nats(cluster.url, NatsAccess(), namespace)
    assert (found.facts["is_cluster"], found.facts["replicas"]) == (True, 3)


def test_of_a_healthy_mesh_each_check_reports_that_it_is() -> None:
    assert not judged()
    checks = {one.check for one in findings(HEALTHY)}
    assert checks == {
        *("etcd", "NATS", "JetStream", "instances", "heartbeats", "ports", "versions", "KV layouts", "prefill"),
        *("clocks", "KV transfer", "NIXL", "/dev/shm"),
    }


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"),
    [
        ({"etcd": [Server("http://e", "unreachable")]}, "etcd", Level.WRONG, "unreachable"),
        ({"nats": Server("nats://n", "refuses this login")}, "NATS", Level.WRONG, "refuses this login"),
        ({"nats": replace(NATS, facts={"max_payload": 1 << 20})}, "NATS", Level.NOTE, "1.0 MB"),
        ({"nats": replace(NATS, latency_ms=900.0)}, "NATS", Level.NOTE, "slow"),
        (
            {"nats": replace(NATS, facts={"max_payload": 8 << 20, "jetstream": "not enabled"})},
            "JetStream",
            Level.NOTE,
            "not enabled",
        ),
        (
            {"nats": replace(NATS, facts={"max_payload": 8 << 20, "jetstream": "", "is_cluster": True, "replicas": 1})},
            "JetStream",
            Level.NOTE,
            "on one member",
        ),
        ({"seen": []}, "instances", Level.WRONG, "none is registered in namespace ns"),
        ({"seen": with_(seen("frontend", answers=False))}, "instances", Level.WRONG, "frontend f1 on here, pid 1"),
        ({"seen": with_(seen("frontend", draining=True))}, "instances", Level.NOTE, "frontend f1 drains"),
        (
            {"seen": with_(seen("decode", draining=True))},
            "instances",
            Level.WRONG,
            "all decode instances drain, so no request can be served",
        ),
        ({"heartbeat_ages_s": {"d1": 0.2, "p1": 9.0}}, "heartbeats", Level.WRONG, "prefill p1 has sent no heartbeat"),
        ({"seen": with_(seen("frontend", event_loop_lag_s=0.9))}, "heartbeats", Level.NOTE, "0.9 s late"),
        ({"pages": {"d1": "http://x/metrics: refused"}}, "ports", Level.WRONG, "metrics page of d1"),
        ({"ports": {"f1": "http://x: refused"}}, "ports", Level.WRONG, "port for clients of f1"),
        (
            {"seen": with_(seen("decode", etcd_contact_age_s=60.0))},
            "contact",
            Level.WRONG,
            "no contact with etcd for 60 s",
        ),
        ({"seen": with_(seen("decode", nats_contact_age_s=60.0))}, "contact", Level.WRONG, "no contact with NATS"),
        ({"seen": with_(seen("frontend", version="2"))}, "versions", Level.NOTE, "2 (frontend f1)"),
        ({"seen": with_(seen("frontend", ahead_s=-3.0))}, "clocks", Level.WRONG, "3.0 s behind"),
        ({"nixl": Nixl("no module")}, "NIXL", Level.NOTE, "no module"),
        ({"nixl": Nixl(plugins=["POSIX"])}, "NIXL", Level.NOTE, "no plugin UCX"),
        ({"shm": None}, "/dev/shm", Level.NOTE, "missing or unreadable"),
        ({"shm": SharedMemory(100, 5)}, "/dev/shm", Level.WRONG, "nearly full"),
        ({"shm": SharedMemory(100, 50, [Segment("/dev/shm/ucx_1", 7, 99.0)])}, "/dev/shm", Level.NOTE, "1 files, 7 B"),
    ],
)
def test_a_fault_is_found_and_nothing_else(changes: dict[str, Any], check: str, level: Level, text: str) -> None:
    found = [one for one in judged(**changes) if (one.check, one.level) == (check, level)]
    assert any(text in one.what for one in found), found
    assert {one.check for one in judged(**changes)} <= {check, "instances", "prefill"}


def test_workers_that_share_a_device_are_named_and_so_are_those_with_several() -> None:
    """`--device prefill=cuda:0,decode=cuda:1 --tp 2` gives cuda:1 to both."""
    prefill = with_ranks(seen("prefill"), "cuda:0", "cuda:1")
    apart = judged(seen=[*HEALTHY.seen[:2], with_ranks(seen("decode"), "cuda:2"), prefill])
    assert not [one for one in apart if one.check in ("devices", "KV layouts")]
    mesh = [*HEALTHY.seen[:2], with_ranks(seen("decode"), "cuda:1", "cuda:2"), prefill]
    [found] = [one for one in judged(seen=mesh) if one.check == "devices"]
    assert found.level is Level.NOTE
    assert found.what == "decode d1 and prefill p1 use cuda:1 of here"
    [told] = [
        one.what for one in findings(replace(HEALTHY, seen=mesh)) if one.check == "devices" and one.level is Level.OK
    ]
    assert told == "decode d1 has cuda:1 cuda:2; prefill p1 has cuda:0 cuda:1"


def unlike(**layout: Any) -> Seen:
    one = seen("prefill")
    assert one.record is not None
    return replace(one, record=changed(one.record, kv=nixl("p1", **layout)))


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (with_(seen("prefill", answers=False)), "p1 is silent"),
        (with_(seen("prefill", draining=True)), "p1 drains"),
        (with_(unlike(layers=5)), "layers: 1 here, 5 there"),
        (with_(seen("decode", breakers={"p1": "open"})), "circuit breaker is open"),
    ],
)
def test_running_decode_only_against_ones_will_is_wrong_and_has_its_reason(mesh: list[Seen], reason: str) -> None:
    """A mesh whose prefill workers were all refused ran decode-only, and no metric showed it."""
    [found] = [one for one in judged(seen=mesh) if one.check == "prefill"]
    assert found.level is Level.WRONG
    assert "decode d1 runs decode-only" in found.what
    assert reason in found.what


def test_one_usable_prefill_instance_is_enough_and_none_at_all_may_be_meant() -> None:
    assert not [one for one in judged(seen=with_(seen("prefill", 2, draining=True))) if one.check == "prefill"]
    [found] = [one for one in judged(seen=HEALTHY.seen[:3]) if one.check == "prefill"]
    assert found.level is Level.NOTE


def test_pages_that_differ_in_size_alone_may_be_exchanged() -> None:
    found = judged(seen=with_(unlike(page_size=8)))
    assert [one.check for one in found] == ["KV layouts"]


def test_a_page_on_another_hosts_loopback_is_no_fault() -> None:
    one = seen("decode")
    assert one.record is not None
    far = replace(one, record=changed(one.record, host="far"))
    [found] = judged(seen=with_(far), pages={"d1": "http://127.0.0.1:1/metrics: refused"})
    assert (found.level, found.check) == (Level.NOTE, "ports")
    assert "on far" in found.what


def test_without_servers_the_instances_are_not_judged() -> None:
    found = findings(Facts("ns", "here", etcd=[Server("http://e", "gone")], nats=NATS))
    assert {one.check for one in found} == {"etcd", "NATS", "JetStream", "NIXL", "/dev/shm"}


def test_the_transport_that_is_in_use_is_named() -> None:
    """Also of a worker on another host: each reports what its own process has open."""
    to_decode = [Connection(local=50_001, remote=7001), Connection(local=50_002, remote=7001)]
    nats = Connection(local=50_003, remote=4222)
    page = Connection(local=9100, remote=50_004)
    far = seen(
        "prefill",
        transport=TransportStatus(ports=[7002, 9100], connections=[*to_decode, nats, page], shared_memory=True),
    )
    assert far.record is not None
    far = replace(far, record=changed(far.record, host="far", http="http://10.0.0.2:9100"))
    decode = seen("decode", transport=TransportStatus(ports=[7001], rdma=True))
    idle = seen("decode", 2, transport=TransportStatus(ports=[7003], connections=[nats]))
    older = seen("decode", 3)
    texts = [
        one.what for one in findings(replace(HEALTHY, seen=(far, decode, idle, older))) if one.check == "KV transfer"
    ]
    assert texts == [
        "prefill p1: nixl/UCX; in use: UCX shared memory mapped, 2 TCP connections with workers",
        "decode d1: nixl/UCX; in use: RDMA device open",
        "decode d2: nixl/UCX; no connection to a peer yet",
        "decode d3: nixl/UCX; the connections of its process are unknown",
    ]


def test_a_report_has_the_advice_below_its_finding() -> None:
    lines = rendered(report(findings(replace(HEALTHY, shm=None))))
    at = next(i for i, line in enumerate(lines) if "missing or unreadable" in line)
    assert lines[at].startswith("note")
    assert "→ in a container" in lines[at + 1]


def test_leftover_segments_are_old_ours_named_like_those_of_transfers_and_mapped_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("ucx_shm_posix_1", "ucx_young", "ucx_mapped", "another")
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    os.utime(tmp_path / "ucx_young")
    monkeypatch.setattr(facts_module, "_mapped_paths", lambda: {str(tmp_path / "ucx_mapped")})
    found = shared_memory(tmp_path)
    assert found is not None
    assert [(one.path, one.bytes) for one in found.left_over] == [(str(tmp_path / "ucx_shm_posix_1"), 5)]
    assert shared_memory(tmp_path / "missing") is None
