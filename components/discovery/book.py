"""Who is registered: a mirror of etcd's records in this process, and whoever wants to hear of changes. No I/O."""

import logging
from collections.abc import Callable, Mapping

from components.wire.instances import InstanceRecord, Role

log = logging.getLogger(__name__)

Listener = Callable[[InstanceRecord | None, InstanceRecord | None], None]  # (what was, what is)


class InstanceBook:
    """Records by key. Stands still while etcd is away: an etcd that blinks does not empty the mesh."""

    def __init__(self) -> None:
        self._records: dict[str, InstanceRecord] = {}
        self._listeners: list[Listener] = []

    def of_role(self, role: Role, model: str | None = None) -> list[InstanceRecord]:
        """Registered instances of a role (that serve `model`), by instance id: the order is the same in every process."""
        found = [r for r in self._records.values() if r.role == role and model in (None, r.model)]
        return sorted(found, key=lambda r: r.instance_id)

    def find(self, instance_id: str, epoch: str | None = None) -> InstanceRecord | None:
        """The record of an instance (in this epoch), if it is registered."""
        for record in self._records.values():
            if record.instance_id == instance_id and epoch in (None, record.epoch):
                return record
        return None

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(was, is)` for every change: None, record is a join; record, None a leave; both a new epoch."""
        self._listeners.append(listener)

    def put(self, key: str, record: InstanceRecord) -> None:
        """A record was written."""
        was = self._records.get(key)
        if was == record:
            return
        self._records[key] = record
        self._tell(was, record)

    def remove(self, key: str) -> None:
        """A record was deleted, or its lease ran out."""
        was = self._records.pop(key, None)
        if was is not None:
            self._tell(was, None)

    def replace_all(self, records: Mapping[str, InstanceRecord]) -> None:
        """What a fresh range over the prefix says: the difference is told as changes."""
        for key in self._records.keys() - records.keys():
            self.remove(key)
        for key, record in records.items():
            self.put(key, record)

    def _tell(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        record = now or was
        assert record is not None
        change = "joined" if was is None else "left" if now is None else "registered again"
        log.debug(f"instance {change}", extra={"role": record.role, "instance": record.instance_id})
        for listener in self._listeners:
            listener(was, now)
