"""Workers of one machine: asks the `services.local` of our namespace, on NATS."""

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from nats.aio.msg import Msg

from components.errors import BackendUnavailable, PeerLost
from components.messaging.bus import Bus, nats_errors
from components.planning.planner import Change
from components.planning.samples import Planned
from components.wire.scaling import AskCounts, Counts, ScaleRole

LISTEN_S: Final = 0.5
ANSWER_S: Final = 3.0


class LocalConnector:
    """Finds the supervisor again whenever it is gone."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._subject: str | None = None

    async def counts(self) -> Mapping[Planned, int]:
        """Workers that the supervisor keeps. Raises: MeshError."""
        counts = await self._call("count", AskCounts())
        return {"prefill": counts.prefill, "decode": counts.decode}

    async def scale(self, change: Change) -> None:
        """One more or one fewer. Raises: MeshError; Rejected, where somebody else has changed it meanwhile."""
        await self._call("scale", ScaleRole(role=change.role, before=change.before, after=change.after))

    async def _call(self, verb: str, request: AskCounts | ScaleRole) -> Counts:
        if self._subject is None:
            self._subject = await self._find()
        try:
            return await self._bus.call(f"{self._subject}.{verb}", request, Counts, timeout_s=ANSWER_S)
        except PeerLost:
            self._subject = None
            raise

    async def _find(self) -> str:
        subjects: set[str] = set()

        async def receive(message: Msg) -> None:
            if message.data:  # else NATS itself: nobody is there
                subject = (json.loads(message.data).get("metadata") or {}).get("subject", "")
                if subject.startswith(f"{self._namespace}.local."):
                    subjects.add(subject)

        inbox = self._bus.client.new_inbox()
        async with self._bus.subscription(inbox, receive):
            with nats_errors("$SRV.PING.kvmesh-local", self._bus.url):
                await self._bus.client.publish("$SRV.PING.kvmesh-local", reply=inbox)
            await asyncio.sleep(LISTEN_S)
        if len(subjects) == 1:
            return subjects.pop()
        if subjects:
            raise BackendUnavailable(
                f"{len(subjects)} services.local answer in namespace {self._namespace}: one is needed"
            )
        raise BackendUnavailable(f"no services.local answers in namespace {self._namespace}")
