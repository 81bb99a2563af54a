"""Checks whether instances answer and are compatible, and whether decode can use prefill."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final
from urllib.parse import urlsplit

from components.errors import IncompatibleLayout
from components.kv_transfer.backend import check_same_backend
from components.messaging.liveness import SILENT_AFTER_S
from components.wire.codec import PROTOCOL
from components.wire.instances import InstanceRecord
from components.wire.layout import check_compatible
from services.inspect.columns import age
from services.inspect.facts import Facts
from services.inspect.findings import Finding, note, ok, wrong
from services.inspect.mesh import Seen

SKEW_S: Final = 1.0
LAG_S: Final = 0.5
NATS_CONTACT_S: Final = 6.0  # three unanswered pings


def check_instances(facts: Facts) -> Iterator[Finding]:
    if not facts.seen:
        yield wrong(
            "instances", f"none is registered in namespace {facts.namespace}", "start them, or set their --namespace"
        )
        return
    yield from _check_each(facts)
    counts: dict[str, int] = {}
    for one in facts.seen:
        counts[one.role] = counts.get(one.role, 0) + (one.status is not None)
    for role in ("frontend", "decode"):
        if not counts.get(role):
            yield wrong(
                "instances",
                f"no {role} instance answers, so no request can be served",
                f"start one: python -m services.{role}",
            )
    decodes = {one.instance_id: one.status for one in facts.seen if one.role == "decode" and one.status is not None}
    if decodes and all(status.draining for status in decodes.values()):
        yield wrong(
            "instances",
            "all decode instances drain, so no request can be served",
            f"undo it for one with `inspect drain {min(decodes)} --undo`, or start another one",
        )
    if counts.get("prefill") and not counts.get("bootstrap"):
        yield wrong(
            "instances",
            "no bootstrap instance answers, so decode computes all prompts",
            "start one: python -m services.bootstrap",
        )
    yield ok("instances", "answer: " + ", ".join(f"{count} {role}" for role, count in counts.items()))


def _check_each(facts: Facts) -> Iterator[Finding]:
    for one in facts.seen:
        if one.status is None:
            where = "" if one.record is None else f" on {one.record.host}, pid {one.record.pid},"
            yield wrong(
                "instances",
                f"{one.role} {one.instance_id}{where} does not answer on NATS",
                "check its log, and whether the process runs; if it hangs, kill -9 and restart it. The record of a killed "
                f"process expires after {facts.lease_ttl_s:g} s",
            )
        elif one.status.draining:
            yield note(
                "instances",
                f"{one.role} {one.instance_id} drains: it accepts no new requests",
                f"undo with `inspect drain {one.instance_id} --undo`",
            )


def check_heartbeats(facts: Facts) -> Iterator[Finding]:
    silent = {name: age_s for name, age_s in facts.heartbeat_ages_s.items() if age_s > SILENT_AFTER_S}
    for one in facts.seen:
        if one.instance_id in silent:
            yield wrong(
                "heartbeats",
                f"{one.role} {one.instance_id} has sent no heartbeat for {age(silent[one.instance_id])}",
                "its event loop or host is stalled: check its log and CPU load; its requests have been moved",
            )
        if one.status is not None and one.status.event_loop_lag_s > LAG_S:
            what = f"the event loop of {one.role} {one.instance_id} was {one.status.event_loop_lag_s:.1f} s late"
            yield note("heartbeats", what, "give the process its own core; `inspect profile` shows what it computes")
    if facts.heartbeat_ages_s and not silent:
        yield ok("heartbeats", f"the oldest is {max(facts.heartbeat_ages_s.values()):.1f} s old")


def check_pages(facts: Facts) -> Iterator[Finding]:
    elsewhere = {
        one.instance_id: one.record.host
        for one in facts.seen
        if one.record is not None and one.record.host != facts.host
    }
    failed = False
    for kind, errors in (("metrics page", facts.pages), ("port for clients", facts.ports)):
        for instance_id, error in errors.items():
            if not error:
                continue
            failed = True
            host = elsewhere.get(instance_id)
            if host is not None and "127.0.0.1" in error:
                what = f"the {kind} of {instance_id} on {host} is reachable only on that host"
                yield note(
                    "ports",
                    what,
                    "set MESH_METRICS_HOST (or MESH_FRONTEND_HOST) there to an address that other hosts can reach",
                )
            else:
                yield wrong(
                    "ports",
                    f"the {kind} of {instance_id} does not answer: {error}",
                    "check its log, and firewalls between this host and that one",
                )
    if not failed:
        yield ok("ports", f"all answer: metrics pages {len(facts.pages)}, frontends {len(facts.ports)}")


def check_contact(facts: Facts) -> Iterator[Finding]:
    for one in facts.seen:
        if one.status is None:
            continue
        for name, age_s, most_s in (
            ("etcd", one.status.etcd_contact_age_s, facts.lease_ttl_s),
            ("NATS", one.status.nats_contact_age_s, NATS_CONTACT_S),
        ):
            if age_s > most_s:
                what = f"{one.role} {one.instance_id} has had no contact with {name} for {age(age_s)}"
                yield wrong(
                    "contact",
                    what,
                    f"check the network between {one.status.host} and {name}; requests continue in the meantime",
                )


def check_versions(facts: Facts) -> Iterator[Finding]:
    for one in facts.seen:
        if one.record is not None and not one.record.is_understood:
            what = f"{one.role} {one.instance_id} speaks protocol {one.record.protocol}, not {PROTOCOL}: others do not use it"
            yield wrong(
                "versions",
                what,
                "run one release on all instances, or upgrade role by role as described in docs/architecture.md",
            )
    versions = _grouped((one.status.version, one) for one in facts.seen if one.status is not None)
    if len(versions) > 1:
        yield note("versions", f"several releases run: {_named(versions)}", "finish the upgrade")
    elif versions:
        yield ok("versions", f"all instances run {next(iter(versions))}")


def check_layouts(facts: Facts) -> Iterator[Finding]:
    layouts = _grouped(
        (f"{one.record.kv.layout.text}, {one.record.kv.backend}", one)
        for one in facts.seen
        if one.record is not None and one.record.kv is not None
    )
    if len(layouts) == 1:
        yield ok("KV layouts", f"all workers: {next(iter(layouts))}")
    elif layouts:
        yield note(
            "KV layouts",
            f"they differ: {_named(layouts)}",
            "workers exchange KV only if one page size divides the other and all else is equal",
        )


def check_devices(facts: Facts) -> Iterator[Finding]:
    """Find devices that several workers use, for example because their ranks overlap. Containers count as hosts."""
    users: dict[tuple[str, str], list[str]] = {}
    several = []
    for one in facts.seen:
        if one.record is None or one.record.kv is None:
            continue
        devices = one.record.kv.devices
        for device in devices:
            if device != "cpu":
                users.setdefault((one.record.host, device), []).append(f"{one.role} {one.instance_id}")
        if len(devices) > 1:
            several.append(f"{one.role} {one.instance_id} has {' '.join(devices)}")
    for (host, device), names in users.items():
        if len(names) > 1:
            yield note(
                "devices",
                f"{' and '.join(names)} use {device} of {host}",
                "give each worker its own devices (it uses --tp devices, beginning with --device), unless "
                "CUDA_VISIBLE_DEVICES gives the same name to different devices",
            )
    if several:
        yield ok("devices", "; ".join(several))


def check_prefill(facts: Facts) -> Iterator[Finding]:
    """Find decode instances that compute all prompts themselves, because they cannot use any prefill instance."""
    prefills = [one for one in facts.seen if one.role == "prefill"]
    decodes = [one for one in facts.seen if one.role == "decode" and one.status is not None]
    if not decodes:
        return
    if not prefills:
        yield note(
            "prefill",
            "no prefill instance is registered: decode computes all prompts",
            "unless this is intended, start one: python -m services.prefill",
        )
        return
    alone = 0
    for decode in decodes:
        reasons = [why for prefill in prefills if (why := _why_unused(decode, prefill, facts.heartbeat_ages_s))]
        if len(reasons) == len(prefills):
            alone += 1
            yield wrong(
                "prefill",
                f"decode {decode.instance_id} runs decode-only, as it cannot use any prefill instance: {'; '.join(reasons)}",
                "start prefill instances with the same model, dtypes and --kv-transfer, or fix the reasons above",
            )
    if not alone:
        yield ok("prefill", f"each of {len(decodes)} decode instances can use one of {len(prefills)} prefill instances")


def _why_unused(decode: Seen, prefill: Seen, ages_s: Mapping[str, float]) -> str:
    """Return why decode sends no prompts to this prefill instance; empty if it does."""
    name = prefill.instance_id
    if prefill.status is None or ages_s.get(name, 0.0) > SILENT_AFTER_S:
        return f"{name} is silent"
    if prefill.status.draining:
        return f"{name} drains"
    if decode.status is not None and decode.status.breakers.get(name) == "open":
        return f"{name} has just failed, and its circuit breaker is open"
    if decode.record is None or prefill.record is None:
        return ""
    return _why_incompatible(decode.record, prefill.record)


def _why_incompatible(ours: InstanceRecord, theirs: InstanceRecord) -> str:
    if ours.kv is None or theirs.kv is None:
        return f"{theirs.instance_id} offers no KV"
    if ours.model != theirs.model:
        return f"{theirs.instance_id} serves {theirs.model}, not {ours.model}"
    try:
        check_compatible(ours.kv.layout, theirs.kv.layout)
        check_same_backend(ours.kv.backend, theirs.kv.backend)
    except IncompatibleLayout as exc:
        return f"{theirs.instance_id}: {exc.message}"
    return ""


def check_clocks(facts: Facts) -> Iterator[Finding]:
    measured = [(one, one.clock) for one in facts.seen if one.clock is not None]
    for one, clock in measured:
        if abs(clock.ahead_s) - clock.uncertain_s > SKEW_S:
            side = "ahead of" if clock.ahead_s > 0 else "behind"
            what = f"the clock of {one.role} {one.instance_id} is {abs(clock.ahead_s):.1f} s {side} this host's"
            yield wrong(
                "clocks",
                what,
                "run NTP or chrony on both hosts. Deadlines and traces are corrected, but times in logs are wrong",
            )
    if measured:
        most = max(abs(clock.ahead_s) for _, clock in measured)
        within = max(clock.uncertain_s for _, clock in measured)
        if most - within <= SKEW_S:
            yield ok("clocks", f"within {1000 * most:.0f} ms of this host's (measured to ± {1000 * within:.0f} ms)")


def check_transport(facts: Facts) -> Iterator[Finding]:
    ports = _kv_ports(facts.seen)
    for one in facts.seen:
        if one.record is None or one.record.kv is None:
            continue
        backend = one.record.kv.backend
        transport = f" by {one.status.kv_transport}" if one.status is not None and one.status.kv_transport else ""
        if backend == "fake":
            yield wrong(
                "KV transfer",
                f"{one.role} {one.instance_id} transfers no KV: backend fake",
                "use --kv-transfer nixl, unless this is a simulation",
            )
            continue
        yield ok(
            "KV transfer",
            f"{one.role} {one.instance_id}: {backend}{transport}{_in_use(one, ports)}",
        )


def _in_use(one: Seen, ports: Set[int]) -> str:
    """Describe the connections of the worker's process. `ports`: those on which workers listen for KV."""
    transport = None if one.status is None else one.status.transport
    if transport is None:
        return "; the connections of its process are unknown"
    connections = sum(bool({c.local, c.remote} & ports) for c in transport.connections)
    ways = [
        *(["RDMA device open"] if transport.rdma else []),
        *(["UCX shared memory mapped"] if transport.shared_memory else []),
        *([f"{connections} TCP connections with workers"] if connections else []),
    ]
    return f"; in use: {', '.join(ways)}" if ways else "; no connection to a peer yet"


def _kv_ports(seen: Sequence[Seen]) -> Set[int]:
    """Return the ports on which workers listen, without those of metrics pages."""
    found: set[int] = set()
    for one in seen:
        if one.status is not None and one.status.transport is not None:
            pages = (
                {urlsplit(url).port for url in (one.record.metrics, one.record.http) if url} if one.record else set()
            )
            found |= {port for port in one.status.transport.ports if port not in pages}
    return found


def _grouped(named: Iterator[tuple[str, Seen]]) -> dict[str, list[Seen]]:
    groups: dict[str, list[Seen]] = {}
    for name, one in named:
        groups.setdefault(name, []).append(one)
    return groups


def _named(groups: Mapping[str, Sequence[Seen]]) -> str:
    return "; ".join(
        f"{name} ({', '.join(f'{one.role} {one.instance_id}' for one in of)})" for name, of in groups.items()
    )
