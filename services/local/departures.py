"""The end of a child, told to the mesh at once: others would take its silence for its end only after two seconds."""

import asyncio

from components.discovery.registry import remove_record
from components.errors import BackendUnavailable
from services.local.output import Output


class Departures:
    """Removes the records of dead children from etcd. Each process of the mesh then asks NATS, finds nobody, and goes on."""

    def __init__(self, etcd_url: str, namespace: str, output: Output) -> None:
        self._etcd_url = etcd_url
        self._namespace = namespace
        self._output = output

    async def announce(self, name: str, instance_id: str) -> None:
        """Remove the record of child `name`, which was registered as `instance_id`."""
        role = name.rpartition("-")[0]
        try:
            await asyncio.to_thread(remove_record, self._etcd_url, self._namespace, role, instance_id)
        except BackendUnavailable as exc:  # its lease expires by itself
            self._output.say("local", f"the end of {name} was not announced", level="warning", cause=exc.message)
