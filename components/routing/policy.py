"""Which instance gets a request. Pure code: the simulator runs what production runs."""

from collections.abc import Sequence

from components.wire.instances import InstanceRecord


class RoundRobin:
    """Each usable instance in turn, over the order of instance ids."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, usable: Sequence[InstanceRecord]) -> InstanceRecord | None:
        """The first instance after the one chosen last; None when none is usable.

        Keeping the last id instead of a count keeps the turn fair when instances come and go.
        """
        if not usable:
            return None
        by_id = sorted(usable, key=lambda r: r.instance_id)
        chosen = next((r for r in by_id if r.instance_id > self._last), by_id[0])
        self._last = chosen.instance_id
        return chosen
