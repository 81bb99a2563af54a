"""Fetching one prompt's KV from a prefill instance, and what must happen to the pages when that fails."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from random import getrandbits as randbits
from typing import Any, TypeVar

from opentelemetry.trace import SpanKind

from components.aio import ended
from components.discovery.registry import Registration, Registry
from components.errors import (
    DeadlineExceeded,
    MeshError,
    NobodyListens,
    NoBootstrapInstance,
    PeerLost,
    PrefillLost,
    reported,
)
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer, check_same_backend
from components.kv_transfer.checksum import PageChecksums, Sent
from components.kv_transfer.page_reader import check_readable
from components.kv_transfer.receiver import Receiver, ReceiveState
from components.messaging.bus import Bus
from components.messaging.deadline import now_ms, remaining_s
from components.messaging.heartbeats import warn_of_protocol
from components.routing.router import Route
from components.telemetry.spans import record_span, tracer
from components.wire.generate import GenerateRequest
from components.wire.instances import InstanceRecord, KvEndpoint
from components.wire.prefill import PrefillAccepted, PrefillRequest, Quiesce, Quiet
from components.wire.rooms import KvComing, OpenRoom, RoomFailed, RoomOk
from components.wire.tokens import num_tokens
from engine.ports import Reserved
from services.decode.bootstrap_choice import LIMIT_S, BootstrapChoice

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
QUIESCE_TIMEOUT_S = 5.0
QUIESCE_AGAIN_S = 0.5
GONE_AFTER_S = 5.0  # nobody has listened under prefill's name for so long: it is not just reconnecting
FENCE_MARGIN_S = 4.0  # after the offer's deadline: for a write posted just before it, and for clocks that differ


@dataclass(slots=True)
class Fetch:
    """One transfer under way."""

    engine_id: str
    prefill: InstanceRecord
    route: Route
    receiver: Receiver
    reserved: asyncio.Future[Reserved]
    offered: Callable[[], None]
    room: str  # where our pages will be offered
    stamp: int  # what the aux slot carries when everything has landed
    asking: asyncio.Task[None] | None = None  # the call to prefill; nobody cancels it while the answer matters
    is_open: bool = False  # the room, with our pages in it
    deadline_unix_ms: int = 0  # of the offer: prefill posts no write after it
    is_cancelled: bool = False  # the client has gone

    @property
    def waits_for_prefill(self) -> bool:
        """And not for our own pages, or for bootstrap."""
        return self.is_open or self.asking is None or not self.asking.done() or self.refusal is not None

    @property
    def refusal(self) -> BaseException | None:
        """Why prefill has not accepted, once that is known."""
        if self.asking is None or not self.asking.done() or self.asking.cancelled():
            return None
        return self.asking.exception()

    @property
    def was_heard(self) -> bool:
        """Whether somebody may have got our question: without it nobody writes."""
        return not isinstance(self.refusal, NobodyListens)


class RemotePrefill:
    """Every transfer into this decode instance."""

    def __init__(
        self,
        bus: Bus,
        registration: Registration,
        registry: Registry,
        transfer: KvTransfer,
        timeout_s: float,
        *,
        bootstrap_timeout_s: float | None = None,  # until our pages are offered; None: as long
        checksums: PageChecksums | None = None,  # when what lands is to be verified
        recomputes: bool = True,  # whether a prompt is computed here when its KV does not come
    ) -> None:
        self._bus = bus
        self._registration = registration
        self._registry = registry
        self._transfer = transfer
        self._timeout_s = timeout_s  # from then on
        self._bootstrap_timeout_s = timeout_s if bootstrap_timeout_s is None else bootstrap_timeout_s
        self._checksums = checksums
        self._fetches: dict[str, Fetch] = {}
        registry.book.subscribe(_bootstrap_changed)
        self._bootstraps = BootstrapChoice(Random(registration.instance_id), or_nobody=recomputes)

    @property
    def has_room(self) -> bool:
        """Whether one more transfer may begin."""
        return self._transfer.aux.num_free > 0

    def check(self, endpoint: KvEndpoint) -> None:
        """Raises: IncompatibleLayout, when its KV would come another way than ours; Rejected, when it cannot be verified."""
        check_same_backend(self._transfer.endpoint.backend, endpoint.backend)
        if self._checksums is not None:
            check_readable(endpoint.device)

    def begin(self, engine_id: str, prefill: InstanceRecord, route: Route, offered: Callable[[], None]) -> Fetch:
        """Take an aux slot for this transfer; `offered` is called when the pages are. Raises: QueueFull: no slot is free."""
        receiver = Receiver(self._transfer, engine_id, self._checksums)
        reserved: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        # Unlike, not secret: the kernel's own call lets go of Python's lock, and the engine's thread would take it.
        room, stamp = f"{randbits(63):x}", randbits(62) + 1
        fetch = Fetch(engine_id, prefill, route, receiver, reserved, offered, room, stamp)
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

    @property
    def num_reserved_pages(self) -> int:
        """Pages of ours that KV is to come into."""
        futures = (fetch.reserved for fetch in self._fetches.values())
        ready = (future for future in futures if future.done() and not future.cancelled() and not future.exception())
        return sum(len(future.result().pages) for future in ready)

    def room_failed(self, failed: RoomFailed) -> None:
        """Prefill or the bootstrap service know that a transfer will not complete."""
        fetch = self._fetches.get(failed.request_id)
        if fetch is not None and fetch.room == failed.room:
            kind = reported(failed.error, PrefillLost)
            fetch.receiver.failure.tell(kind(f"prefill {fetch.prefill.instance_id}: {failed.cause}"))

    def kv_coming(self, coming: KvComing) -> None:
        """The last pages of a room are about to be written."""
        self._transfer.hasten(coming.room)

    def ask(self, fetch: Fetch, request: GenerateRequest) -> None:
        """Have prefill begin; meanwhile the engine is to be asked for pages."""
        fetch.asking = asyncio.create_task(self._ask(fetch, request), name=f"ask {fetch.engine_id}")
        fetch.asking.add_done_callback(partial(_answered, fetch))

    async def run(self, fetch: Fetch, request: GenerateRequest) -> AuxRecord:
        """Bring the prompt's KV into the reserved pages and return what came beside it. Prefill has been asked.

        Raises: MeshError, when this prompt must be computed here; the pages may still be written to until `settle`.
        """
        left_s = min(self._bootstrap_timeout_s, remaining_s(request.deadline_unix_ms))
        reserved = await self._within(left_s, "beginning of a transfer from", fetch, self._prepare(fetch))
        left_s = min(self._timeout_s, remaining_s(request.deadline_unix_ms))
        sent = self._sent(fetch, request, reserved)
        return await self._within(left_s, "KV from", fetch, self._receive(fetch, reserved, sent, left_s))

    async def settle(self, fetch: Fetch) -> None:
        """Return when nothing can write into the pages of a fetch any more, whatever became of it."""
        was = fetch.receiver.lifecycle.state
        if fetch.receiver.abandon():
            await self._until_answered(fetch)
            if fetch.was_heard:
                await self._until_quiet(fetch)
            fetch.receiver.close()
        elif was is ReceiveState.BOOTSTRAPPING:
            await self._call_off(fetch)
        elif fetch.asking is not None:  # it has sent everything: its answer may have got lost
            fetch.asking.cancel()
        self._fetches.pop(fetch.engine_id, None)

    async def _within(self, seconds: float, what: str, fetch: Fetch, work: Coroutine[Any, Any, T]) -> T:
        late = DeadlineExceeded(f"no {what} prefill {fetch.prefill.instance_id} in {seconds:.3g} s")
        return await fetch.receiver.failure.within(seconds, late, work)

    async def _prepare(self, fetch: Fetch) -> Reserved:
        """Pages of ours. Prefill may answer when they are offered already."""
        asked_ns = time.time_ns()
        reserved = await fetch.reserved
        record_span("decode.reserve", asked_ns, attributes={"kvmesh.pages": len(reserved.pages)})
        return reserved

    def _sent(self, fetch: Fetch, request: GenerateRequest, reserved: Reserved) -> Sent:
        ours, theirs = self._transfer.endpoint, fetch.prefill.kv
        assert theirs is not None, "an instance without KV is not chosen"
        tokens = range(reserved.num_cached_pages * ours.layout.page_size, num_tokens(request.token_ids))
        return Sent(reserved.pages, tokens, theirs.layout.page_size)

    async def _receive(self, fetch: Fetch, reserved: Reserved, sent: Sent, timeout_s: float) -> AuxRecord:
        await self._offer(fetch, reserved, now_ms() + int(timeout_s * 1000))
        fetch.is_open = True
        with tracer.start_as_current_span("decode.receive") as span:
            span.set_attribute("kvmesh.transfer.backend", self._transfer.endpoint.backend)
            return await fetch.receiver.landed(fetch.stamp, len(reserved.pages), sent)

    async def _ask(self, fetch: Fetch, request: GenerateRequest) -> None:
        life_s = self._bootstrap_timeout_s + self._timeout_s
        asking = PrefillRequest(
            request_id=fetch.engine_id,
            epoch=fetch.prefill.epoch,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            room=fetch.room,
            stamp=fetch.stamp,
            token_ids=request.token_ids,
            deadline_unix_ms=min(request.deadline_unix_ms, now_ms() + int(life_s * 1000)),
            sender=self._registration.instance_id,
            sent_unix_ms=now_ms(),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            adapter=request.adapter,
            adapter_identity=fetch.prefill.adapters.get(request.adapter, ""),
            layout=self._transfer.endpoint.layout,
            verify_kv=self._checksums is not None,
        )
        with tracer.start_as_current_span("decode.call_prefill", kind=SpanKind.CLIENT) as span:
            span.set_attribute("kvmesh.prefill.instance", fetch.prefill.instance_id)
            call = self._bus.call(f"{fetch.prefill.subject}.prefill", asking, PrefillAccepted, timeout_s=CALL_TIMEOUT_S)
            accepted = await call
        fetch.route.accepted(accepted.number)

    async def _offer(self, fetch: Fetch, reserved: Reserved, deadline_unix_ms: int) -> None:
        """Open the room, at one replica or another. Raises: NoBootstrapInstance."""
        opening = OpenRoom(
            room=fetch.room,
            request_id=fetch.engine_id,
            prefill_id=fetch.prefill.instance_id,
            prefill_epoch=fetch.prefill.epoch,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            pages=reserved.pages,
            num_cached_pages=reserved.num_cached_pages,
            aux_slot=fetch.receiver.slot,
            deadline_unix_ms=deadline_unix_ms,
            sender=self._registration.instance_id,
            sent_unix_ms=now_ms(),
            layout=self._transfer.endpoint.layout,
        )
        replicas = [r for r in self._registry.book.of_role("bootstrap") if r.is_understood]
        if not replicas:
            raise NoBootstrapInstance("no bootstrap instance is registered")
        fetch.deadline_unix_ms = deadline_unix_ms
        fetch.receiver.offer(fetch.room)  # exposed from the moment the offer may leave
        fetch.offered()

        async def ask(replica: InstanceRecord) -> None:
            await self._bus.call(f"{replica.subject}.open", opening, RoomOk, timeout_s=LIMIT_S)

        with tracer.start_as_current_span("decode.open_room", kind=SpanKind.CLIENT):
            await self._bootstraps.open(replicas, ask)

    async def _call_off(self, fetch: Fetch) -> None:
        """No page was offered, so nothing can be written; but prefill may compute, and hold its pages till the deadline."""
        if fetch.asking is None:
            return
        await self._until_answered(fetch)
        with suppress(MeshError):  # a prefill that is gone holds nothing
            await self._bus.publish(f"{fetch.prefill.subject}.quiesce", _quiesce(fetch))

    async def _until_answered(self, fetch: Fetch) -> None:
        """Prefill is told nothing before: the word would overtake the question, and find nothing to stop."""
        if fetch.asking is not None:
            await ended(fetch.asking)

    async def _until_quiet(self, fetch: Fetch) -> None:
        """Return when prefill cannot write into our pages any more.

        Only prefill itself knows: a released handle proves nothing, nor does a dead peer's message. A prefill that NATS
        cannot find may be cut off, and still write. But it posts no write after the offer's deadline, so the pages are
        safe when that has passed and prefill has been gone for seconds.
        """
        prefill = fetch.prefill
        gone_since: float | None = None
        while True:
            try:
                await self._bus.call(f"{prefill.subject}.quiesce", _quiesce(fetch), Quiet, timeout_s=QUIESCE_TIMEOUT_S)
            except PeerLost:
                gone_since = gone_since or time.monotonic()
                late_s = (now_ms() - fetch.deadline_unix_ms) / 1000
                if time.monotonic() - gone_since > GONE_AFTER_S and late_s > FENCE_MARGIN_S:
                    return
            except MeshError as exc:
                gone_since = None
                log.debug("not quiet yet", extra={"request": fetch.engine_id, "cause": exc.message})
            except Exception:  # pages must come back, whatever went wrong here
                gone_since = None
                log.exception("quiesce failed, trying again", extra={"request": fetch.engine_id})
            else:
                return
            await asyncio.sleep(QUIESCE_AGAIN_S)


def _bootstrap_changed(was: InstanceRecord | None, now: InstanceRecord | None) -> None:
    if now is not None and now.role == "bootstrap":
        warn_of_protocol(was, now)


def _answered(fetch: Fetch, _: asyncio.Task[None]) -> None:
    """Without prefill's word the transfer is in vain, however far it is."""
    if isinstance(fetch.refusal, Exception):
        fetch.receiver.failure.tell(fetch.refusal)


def _quiesce(fetch: Fetch) -> Quiesce:
    cause = "the client has gone" if fetch.is_cancelled else "decode gave this transfer up"
    return Quiesce(request_id=fetch.engine_id, cause=cause, cancelled=fetch.is_cancelled)
