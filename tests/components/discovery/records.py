"""Instance records to register and to look for."""

from typing import Any

from msgspec.structs import replace

from components.wire.codec import OLDEST, PROTOCOL
from components.wire.instances import InstanceRecord


def record(instance_id: str = "one", epoch: str = "e1", **facts: Any) -> InstanceRecord:
    role = facts.pop("role", "decode")
    plain = InstanceRecord(
        instance_id=instance_id,
        epoch=epoch,
        role=role,
        host="h",
        pid=1,
        started_unix_ms=0,
        subject=f"ns.{role}.{instance_id}",
        protocol=PROTOCOL,
        oldest_protocol=OLDEST,
    )
    return replace(plain, **facts)
