"""A mirror of etcd's instance records, with listeners. No I/O."""

import logging
from collections.abc import Callable, Mapping

from components.wire.instances import InstanceRecord, Role

log = logging.getLogger(__name__)

Listener = Callable[[InstanceRecord | None, InstanceRecord | None], None]  # (before, after); None: no record


class InstanceBook:
    """Instance records by key.

    If `on_missing` is set, `remove` keeps a record until `put` or `drop`. Its instance may be alive: it lost etcd, or etcd
    lost its data.
    """

    def __init__(self) -> None:
        self.on_missing: Callable[[str], None] | None = None  # called with the key
        self.missing_in_etcd: set[str] = set()
        self._records: dict[str, InstanceRecord] = {}
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._records)

    def of_role(self, role: Role) -> list[InstanceRecord]:
        return sorted((r for r in self._records.values() if r.role == role), key=lambda r: r.instance_id)

    def find(self, role: Role, instance_id: str, epoch: str | None = None) -> InstanceRecord | None:
        """An instance id is unique only within a role."""
        for record in self._records.values():
            if record.instance_id == instance_id and record.role == role and epoch in (None, record.epoch):
                return record
        return None

    def at(self, key: str) -> InstanceRecord | None:
        return self._records.get(key)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def follow(self, role: Role, listener: Listener) -> None:
        """Call `listener` for each record of a role, and each change of one."""

        def changed(was: InstanceRecord | None, now: InstanceRecord | None) -> None:
            if role in (was and was.role, now and now.role):
                listener(was, now)

        for record in self.of_role(role):
            listener(None, record)
        self.subscribe(changed)

    def put(self, key: str, record: InstanceRecord) -> None:
        self.missing_in_etcd.discard(key)
        before = self._records.get(key)
        if before != record:
            self._records[key] = record
            self._notify(before, record)

    def remove(self, key: str) -> None:
        if self.on_missing is None:
            self.drop(key)
        elif key in self._records and key not in self.missing_in_etcd:
            self.missing_in_etcd.add(key)
            self.on_missing(key)

    def drop(self, key: str) -> None:
        self.missing_in_etcd.discard(key)
        before = self._records.pop(key, None)
        if before is not None:
            self._notify(before, None)

    def replace_all(self, records: Mapping[str, InstanceRecord]) -> None:
        for key in self._records.keys() - records.keys():
            self.remove(key)
        for key, record in records.items():
            self.put(key, record)

    def _notify(self, before: InstanceRecord | None, after: InstanceRecord | None) -> None:
        record = after or before
        assert record is not None
        change = "joined" if before is None else "left" if after is None else "changed"
        log.debug(f"instance {change}", extra={"role": record.role, "instance": record.instance_id})
        for listener in self._listeners:
            listener(before, after)
