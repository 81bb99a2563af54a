"""Made-up instances for `inspect`."""

import dataclasses
from typing import Any

from msgspec.structs import replace

from components.wire.instances import KvEndpoint, RankEndpoint, Role
from components.wire.layout import of_shard
from components.wire.status import PageStatus, Status
from services.inspect.mesh import Clock, Seen
from tests.components.discovery.records import record
from tests.components.kv_transfer.fake_transfer import endpoint

LETTERS = {"frontend": "f", "decode": "d", "prefill": "p", "bootstrap": "b"}


def nixl(name: str, **layout: Any) -> KvEndpoint:
    made = endpoint(name)
    return replace(made, backend="nixl/UCX", layout=replace(made.layout, **layout))


def with_ranks(one: Seen, *devices: str) -> Seen:
    """Return the worker on several devices."""
    assert one.record is not None
    assert one.record.kv is not None
    followers = [RankEndpoint(pid=100 + i, device=device, base_address=0) for i, device in enumerate(devices[1:], 1)]
    layout = of_shard(one.record.kv.layout, 0, len(devices))
    kv = replace(one.record.kv, device=devices[0], layout=layout, followers=followers)
    return dataclasses.replace(one, record=replace(one.record, kv=kv))


def seen(role: Role, number: int = 1, *, answers: bool = True, ahead_s: float = 0.0, **told: Any) -> Seen:
    """`told`: fields of its status."""
    name = f"{LETTERS[role]}{number}"
    is_worker = role in ("decode", "prefill")
    kept = record(name, "e", role=role, host="here", model="m", kv=nixl(name) if is_worker else None)
    if not answers:
        return Seen(role, name, kept.subject, kept)
    pages = PageStatus(total=100, free=50, cached=30, held=20) if is_worker else None
    usual = {"version": "1", "host": "here", "pages": pages, "uptime_s": 90.0}
    status = Status(instance_id=name, role=role, **{**usual, **told})
    return Seen(role, name, kept.subject, kept, status, Clock(ahead_s, 0.001))
