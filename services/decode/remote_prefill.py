"""Fetching one prompt's KV from a prefill instance, and what must happen to the pages when that fails."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from components.discovery.registry import Registration, Registry
from components.errors import DeadlineExceeded, MeshError, NoBootstrapInstance, PeerLost, PrefillLost
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.receiver import Receiver, ReceiveState
from components.messaging.bus import Bus
from components.messaging.deadline import now_ms, remaining_s
from components.telemetry.spans import record_span, tracer
from components.wire.generate import GenerateRequest
from components.wire.instances import InstanceRecord
from components.wire.prefill import PrefillAccepted, PrefillRequest, Quiesce, Quiet
from components.wire.rooms import OfferPages, RoomFailed, RoomOk
from engine.ports import Reserved

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
QUIESCE_TIMEOUT_S = 5.0
QUIESCE_AGAIN_S = 0.5


@dataclass(slots=True)
class Fetch:
    """One transfer under way."""

    engine_id: str
    prefill: InstanceRecord
    receiver: Receiver
    reserved: asyncio.Future[Reserved]
    offered: Callable[[], None]
    room: str | None = None


class RemotePrefill:
    """Every transfer into this decode instance."""

    def __init__(
        self, bus: Bus, registration: Registration, registry: Registry, transfer: KvTransfer, timeout_s: float
    ) -> None:
        self._bus = bus
        self._registration = registration
        self._registry = registry
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._fetches: dict[str, Fetch] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more transfer may begin."""
        return self._transfer.aux.num_free > 0

    def begin(self, engine_id: str, prefill: InstanceRecord, offered: Callable[[], None]) -> Fetch:
        """Take an aux slot for this transfer; `offered` is called when the pages are. Raises: QueueFull: no slot is free."""
        receiver = Receiver(self._transfer, engine_id)
        fetch = Fetch(engine_id, prefill, receiver, asyncio.get_running_loop().create_future(), offered)
        self._fetches[engine_id] = fetch
        return fetch

    def reserved(self, event: Reserved) -> None:
        """The engine has pages for a prompt."""
        fetch = self._fetches.get(event.request_id)
        if fetch is not None and not fetch.reserved.done():
            fetch.reserved.set_result(event)

    def instance_lost(self, record: InstanceRecord, why: str) -> None:
        """A prefill instance is gone, silent or hung: its transfers will not complete."""
        for fetch in self._fetches.values():
            if (fetch.prefill.instance_id, fetch.prefill.epoch) == (record.instance_id, record.epoch):
                fetch.receiver.failure.tell(PrefillLost(f"prefill {record.instance_id}: {why}"))

    def room_failed(self, failed: RoomFailed) -> None:
        """The bootstrap service knows that a transfer will not complete."""
        fetch = self._fetches.get(failed.request_id)
        if fetch is not None and fetch.room in (None, failed.room):
            fetch.receiver.failure.tell(PrefillLost(f"{failed.error}: {failed.cause}"))

    async def run(self, fetch: Fetch, request: GenerateRequest) -> AuxRecord:
        """Bring the prompt's KV into the reserved pages and return what came beside it.

        Raises: MeshError, when this prompt must be computed here; the pages may still be written to until `settle`.
        """
        timeout_s = min(self._timeout_s, remaining_s(request.deadline_unix_ms))
        try:
            async with asyncio.timeout(timeout_s):
                return await fetch.receiver.failure.unless(self._fetch(fetch, request, timeout_s))
        except TimeoutError as exc:
            raise DeadlineExceeded(f"no KV from prefill {fetch.prefill.instance_id} in {timeout_s:.0f} s") from exc

    async def settle(self, fetch: Fetch) -> None:
        """Return when nothing can write into the pages of a fetch any more, whatever became of it."""
        was = fetch.receiver.lifecycle.state
        if fetch.receiver.abandon():
            await self._until_quiet(fetch)
            fetch.receiver.close()
        elif was is ReceiveState.BOOTSTRAPPING:
            await self._call_off(fetch)
        self._fetches.pop(fetch.engine_id, None)

    async def _fetch(self, fetch: Fetch, request: GenerateRequest, timeout_s: float) -> AuxRecord:
        asked_ns = time.time_ns()
        accepted = await self._ask(fetch, request, timeout_s)
        fetch.room = accepted.room
        reserved = await fetch.reserved
        record_span("decode.reserve", asked_ns, attributes={"kvmesh.pages": len(reserved.pages)})
        await self._offer(fetch, accepted, reserved)
        with tracer.start_as_current_span("decode.receive"):
            return await fetch.receiver.landed(accepted.stamp, len(reserved.pages))

    async def _ask(self, fetch: Fetch, request: GenerateRequest, timeout_s: float) -> PrefillAccepted:
        asking = PrefillRequest(
            request_id=fetch.engine_id,
            epoch=fetch.prefill.epoch,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            token_ids=request.token_ids,
            deadline_unix_ms=now_ms() + int(timeout_s * 1000),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            adapter=request.adapter,
        )
        with tracer.start_as_current_span("decode.call_prefill", kind=SpanKind.CLIENT) as span:
            span.set_attribute("kvmesh.prefill.instance", fetch.prefill.instance_id)
            return await self._bus.call(
                f"{fetch.prefill.subject}.prefill", asking, PrefillAccepted, timeout_s=CALL_TIMEOUT_S
            )

    async def _offer(self, fetch: Fetch, accepted: PrefillAccepted, reserved: Reserved) -> None:
        replica_id = accepted.room.partition("/")[0]
        replica = self._registry.book.find(replica_id)
        if replica is None:
            raise NoBootstrapInstance(f"bootstrap instance {replica_id} is gone, and its rooms with it")
        offer = OfferPages(
            room=accepted.room,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            pages=reserved.pages,
            num_cached_pages=reserved.num_cached_pages,
            aux_slot=fetch.receiver.slot,
        )
        fetch.receiver.offer(accepted.room)  # exposed from the moment the offer may leave
        fetch.offered()
        with tracer.start_as_current_span("decode.offer", kind=SpanKind.CLIENT):
            await self._bus.call(f"{replica.subject}.offer", offer, RoomOk, timeout_s=CALL_TIMEOUT_S)

    async def _call_off(self, fetch: Fetch) -> None:
        """No page was offered, so nothing can be written; but prefill may compute, and hold its pages till the deadline."""
        with suppress(MeshError):  # a prefill that is gone holds nothing
            await self._bus.publish(f"{fetch.prefill.subject}.quiesce", _quiesce(fetch))

    async def _until_quiet(self, fetch: Fetch) -> None:
        """Ask prefill itself: a released handle proves nothing, nor does a dead peer's message.

        Nor does etcd alone: a process that was stopped, or lost its lease and has not noticed, goes on writing. It is gone
        when neither etcd nor NATS knows it any more.
        """
        prefill = fetch.prefill
        while True:
            try:
                await self._bus.call(f"{prefill.subject}.quiesce", _quiesce(fetch), Quiet, timeout_s=QUIESCE_TIMEOUT_S)
            except MeshError as exc:
                nobody_listens = isinstance(exc, PeerLost)
                if nobody_listens and self._registry.book.find(prefill.instance_id, prefill.epoch) is None:
                    return
                log.debug("not quiet yet", extra={"request": fetch.engine_id, "cause": exc.message})
                await asyncio.sleep(QUIESCE_AGAIN_S)
            else:
                return


def _quiesce(fetch: Fetch) -> Quiesce:
    return Quiesce(request_id=fetch.engine_id, cause="decode gave this transfer up")
