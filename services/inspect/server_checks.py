"""Checks servers and this host: etcd, NATS, NIXL, shared memory."""

from collections.abc import Iterator
from typing import Final

from components.messaging.bus import HEADERS_BYTES
from components.wire.codec import MAX_MESSAGE_BYTES
from services.inspect.facts import SHM, Facts, Nixl, Server
from services.inspect.findings import Finding, note, ok, wrong
from services.inspect.top import size

SLOW_MS: Final = 200.0
SHM_FREE: Final = 0.1  # of it


def check_etcd(facts: Facts) -> Iterator[Finding]:
    yield from (_server("etcd", one, _etcd_facts(one)) for one in facts.etcd)


def _etcd_facts(one: Server) -> str:
    role = "leader" if one.facts.get("is_leader") else "follower"
    return f"{role}, {size(one.facts.get('db_bytes', 0))} of data; read with a quorum and written"


def check_nats(facts: Facts) -> Iterator[Finding]:
    bus = facts.nats
    if bus is None:
        return
    payload = bus.facts.get("max_payload", 0)
    yield _server("NATS", bus, f"max_payload {size(payload)}")
    if bus.error:
        return
    if payload < MAX_MESSAGE_BYTES:
        what = f"NATS accepts messages of up to {size(payload)}, so longer prompts are refused"
        yield note(
            "NATS",
            what,
            f"set max_payload: {MAX_MESSAGE_BYTES} in the server's configuration ({HEADERS_BYTES} bytes are for headers)",
        )
    if missing := bus.facts.get("jetstream"):
        what = f"JetStream does not answer ({missing}), so responses are not stored"
        yield note("JetStream", what, "enable it: `jetstream {}` in the server's configuration, or nats-server -js")
    else:
        stored = f"{bus.facts.get('streams', 0)} streams, {size(bus.facts.get('stored_bytes', 0))}"
        yield ok("JetStream", f"enabled: {stored}")
    if bus.facts.get("is_cluster") and bus.facts.get("replicas") == 1:
        yield note(
            "JetStream",
            "stored responses are on one member of the NATS cluster: while it is down, none is read or stored",
            "start the frontends with MESH_FRONTEND_STORED_RESPONSES_REPLICAS=3",
        )


def _server(name: str, one: Server, about: str) -> Finding:
    if one.error:
        return wrong(name, one.error, one.do)
    text = f"{one.url}: version {one.version}, {one.latency_ms:.0f} ms, {about}"
    if one.latency_ms > SLOW_MS:
        return note(name, f"{text}: slow", "check disk and CPU load of its host")
    return ok(name, text)


def check_nixl(facts: Facts) -> Iterator[Finding]:
    yield nixl_finding(facts.nixl)


def nixl_finding(nixl: Nixl) -> Finding:
    if nixl.error:
        return note("NIXL", f"cannot be loaded on this host: {nixl.error}", "workers here need it: pip install nixl")
    if "UCX" not in nixl.plugins:
        return note(
            "NIXL",
            f"has no plugin UCX here, only {', '.join(nixl.plugins)}",
            "reinstall nixl, or choose --kv-transfer nixl/PLUGIN",
        )
    return ok("NIXL", f"plugins on this host: {', '.join(nixl.plugins)}")


def check_shm(facts: Facts) -> Iterator[Finding]:
    shm = facts.shm
    if shm is None:
        yield note(str(SHM), "missing or unreadable", "in a container, mount one: --shm-size 1g")
        return
    free = f"{size(shm.free_bytes)} of {size(shm.total_bytes)} free"
    if shm.free_bytes < SHM_FREE * shm.total_bytes:
        yield wrong(
            str(SHM),
            f"nearly full: {free}",
            "remove leftover files, or enlarge it: mount -o remount,size=8g /dev/shm, docker --shm-size",
        )
    else:
        yield ok(str(SHM), free)
    if shm.left_over:
        paths = [segment.path for segment in shm.left_over]
        what = (
            f"{len(paths)} files, {size(sum(s.bytes for s in shm.left_over))}, that none of your processes has mapped"
        )
        yield note(
            str(SHM),
            what,
            f"left by killed processes; remove them: rm {' '.join(paths[:4])}{' …' if len(paths) > 4 else ''}",
        )
