"""Messages to prefill and bootstrap for the transfers into this decode instance."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

from opentelemetry.trace import SpanKind

from components.aio import ended
from components.discovery.registry import Registration, Registry
from components.errors import (
    DeadlineExceeded,
    MeshError,
    NoBootstrapInstance,
    PeerLost,
    PrefillLost,
    reported,
)
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer, check_same_backend
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.page_reader import check_readable
from components.lifecycle import Tally
from components.messaging.bus import Bus
from components.messaging.clocks import now_ms, remaining_s
from components.messaging.liveness import warn_of_protocol
from components.routing.router import Route
from components.telemetry.figures import Queue, queues_of
from components.telemetry.spans import record_step, step
from components.wire.generate import GenerateRequest
from components.wire.instances import InstanceRecord, KvEndpoint
from components.wire.prefill import (
    KvComing,
    OpenRoom,
    PrefillAccepted,
    PrefillRequest,
    Quiesce,
    Quiet,
    RoomFailed,
    RoomOk,
)
from components.wire.status import RoomStatus
from components.wire.tokens import num_tokens
from engine.ports import Exposed
from services.decode.bootstrap_choice import OPEN_TIMEOUT_S, BootstrapChoice
from services.decode.inbound import NEXT, InboundState, InboundTransfer
from services.decode.keyed_random import KeyedRandom

log = logging.getLogger(__name__)

randbits: Final = KeyedRandom()

S = InboundState
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 10.0
QUIESCE_TIMEOUT_S = 5.0
QUIESCE_AGAIN_S = 0.5
CONFIRM_NOT_WRITING_S: Final = 1.0  # for an instance that refused the prompt
GONE_AFTER_S = 5.0  # time without a listener on prefill's subject; longer than a reconnect takes
FENCE_MARGIN_S: Final = 4.0  # after the offer's deadline: for a write posted just before it, and for clocks that differ


class PrefillClient:
    """All inbound transfers. `_within` enforces deadlines, `instance_lost` handles lost peers."""

    def __init__(
        self,
        bus: Bus,
        registration: Registration,
        registry: Registry,
        transfer: KvTransfer,
        timeout_s: float,  # from the offer to the last byte
        *,
        bootstrap_timeout_s: float,  # from the request to the offer
        checksums: PageChecksums | None,  # if KV is to be verified
        recomputes: bool,  # prompts whose KV does not arrive
    ) -> None:
        self.tally = Tally(NEXT)
        self._bus = bus
        self._registration = registration
        self._registry = registry
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._checksums = checksums
        self._transfers: dict[str, InboundTransfer] = {}  # by engine id
        registry.book.follow("bootstrap", _bootstrap_changed)
        self._bootstraps = BootstrapChoice(Random(registration.instance_id), or_none=recomputes)

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def has_free_aux_slot(self) -> bool:
        return self._transfer.aux.num_free > 0

    @property
    def num_reserved_pages(self) -> int:
        return sum(self._num_exposed(each.reserved.result()) for each in self._transfers.values() if each.has_pages)

    @property
    def num_exposed_pages(self) -> int:
        exposed = (each for each in self._transfers.values() if each.lifecycle.state in (S.TRANSFER, S.PINNED))
        return sum(self._num_exposed(each.reserved.result()) for each in exposed)

    def is_under_way(self, engine_id: str) -> bool:
        """Return whether KV may still arrive for this request."""
        transfer = self._transfers.get(engine_id)
        return transfer is not None and transfer.lifecycle.state not in (S.PINNED, S.CLOSED)

    def num_bytes(self, transfer: InboundTransfer) -> int:
        """Bytes that prefill has written. Call it after they have arrived."""
        return self._num_exposed(transfer.reserved.result()) * self._transfer.endpoint.page_bytes

    def _num_exposed(self, reserved: Exposed) -> int:
        return len(reserved.pages) - reserved.num_computed // self._transfer.endpoint.layout.page_size

    def rooms(self) -> list[RoomStatus]:
        now_s = time.monotonic()
        return [
            RoomStatus(
                room=each.room,
                request_id=each.engine_id,
                state=str(each.lifecycle.state),
                age_s=now_s - each.began_s,
                peer=each.prefill.instance_id,
            )
            for each in self._transfers.values()
        ]

    def queues(self) -> dict[str, Queue]:
        return queues_of((each.lifecycle for each in self._transfers.values()), self.tally.states)

    def bootstrap_breakers(self) -> dict[str, str]:
        return self._bootstraps.states()

    def check(self, endpoint: KvEndpoint) -> None:
        """Raises: IncompatibleLayout, for another KV transfer backend; Rejected, if the instance's KV cannot be verified."""
        check_same_backend(self._transfer.endpoint.backend, endpoint.backend)
        if self._checksums is not None:
            check_readable(endpoint.device)

    def begin(self, engine_id: str, prefill: InstanceRecord, refused: InboundTransfer | None = None) -> InboundTransfer:
        """Start a transfer. `refused`: an earlier one that `confirm_not_writing` stopped; its pages are offered again.

        Raises: QueueFull, if no aux slot is free.
        """
        # Any process that knows a room's id may offer pages for it, so the ids must not be predictable.
        room, stamp = f"{randbits(63):x}", randbits(62) + 1
        transfer = InboundTransfer(
            self._transfer,
            engine_id,
            prefill,
            room,
            stamp,
            checksums=self._checksums,
            tally=self.tally,
        )
        if refused is not None and refused.has_pages:
            transfer.reserved.set_result(refused.reserved.result())
        self._transfers[engine_id] = transfer
        return transfer

    def reserved(self, event: Exposed) -> None:
        transfer = self._transfers.get(event.request_id)
        if transfer is not None and not transfer.reserved.done():
            transfer.reserved.set_result(event)

    def instance_lost(self, record: InstanceRecord, why: str) -> None:
        for transfer in self._transfers.values():
            if (transfer.prefill.instance_id, transfer.prefill.epoch) == (record.instance_id, record.epoch):
                transfer.failure.report(PrefillLost(f"prefill {record.instance_id}: {why}"))

    def room_failed(self, failed: RoomFailed) -> None:
        transfer = self._transfers.get(failed.request_id)
        if transfer is not None and transfer.room == failed.room:
            transfer.is_quiet |= failed.stamp == transfer.stamp  # only prefill knows it
            kind = reported(failed.error, PrefillLost)
            transfer.failure.report(kind(f"prefill {transfer.prefill.instance_id}: {failed.cause}"))

    def offered(self, engine_id: str, room: str) -> Exposed | None:
        """Return the pages of the transfer in `room` while prefill may write into them, else None."""
        transfer = self._transfers.get(engine_id)
        if transfer is None or transfer.room != room or transfer.lifecycle.state is not S.TRANSFER:
            return None
        return transfer.reserved.result()

    def kv_coming(self, coming: KvComing) -> None:
        self._transfer.poll_often(coming.room)

    def call_prefill(self, transfer: InboundTransfer, request: GenerateRequest, route: Route) -> None:
        transfer.prefill_call = asyncio.create_task(
            self._call_prefill(transfer, request, route, time.time_ns()), name=f"ask {transfer.engine_id}"
        )
        transfer.prefill_call.add_done_callback(partial(_fail_if_refused, transfer))

    async def receive_kv(self, transfer: InboundTransfer, request: GenerateRequest) -> AuxRecord:
        """Raises: MeshError. Even then, pages are safe only after `wait_until_pages_safe`."""
        left_s = min(self._bootstrap_timeout_s, remaining_s(request.deadline_unix_ms))
        reserved = await self._within(
            left_s, "page of this decode instance became free for KV from", transfer, _pages_of(transfer)
        )
        left_s = min(self._timeout_s, remaining_s(request.deadline_unix_ms))
        tokens = range(reserved.num_computed, num_tokens(request.token_ids))
        work = self._receive(transfer, reserved, tokens, left_s)
        return await self._within(left_s, "KV arrived from", transfer, work)

    async def confirm_not_writing(self, transfer: InboundTransfer) -> bool:
        """Make sure that a prefill instance that refused will not write, so that the pages can be offered to another one.

        Returns: False, if this cannot be confirmed in CONFIRM_NOT_WRITING_S. The caller must then call `wait_until_pages_safe`.
        """
        try:
            async with asyncio.timeout(CONFIRM_NOT_WRITING_S):
                await self._stop(transfer, "decode sends it to another prefill instance")
        except TimeoutError:
            return False
        return True

    async def wait_until_pages_safe(self, transfer: InboundTransfer, *, cancelled: bool = False) -> None:
        """Stop prefill if it is still working, and return when it can no longer write into the pages.

        `cancelled`: the client has gone.
        """
        cause = "the client has gone" if cancelled else "decode has given this transfer up"
        await self._stop(transfer, cause, cancelled=cancelled)
        if self._transfers.get(transfer.engine_id) is transfer:
            del self._transfers[transfer.engine_id]

    async def _stop(self, transfer: InboundTransfer, cause: str, *, cancelled: bool = False) -> None:
        quiesce = Quiesce(request_id=transfer.engine_id, cause=cause, cancelled=cancelled, epoch=transfer.prefill.epoch)
        match transfer.give_up():
            case S.PINNED:
                await _until_answered(transfer)
                if not transfer.reached_no_process:
                    await self._until_quiet(transfer, quiesce)
                    with suppress(MeshError):  # this process is stopping
                        await self._transfer.drain_sockets()
                transfer.close()
            case S.CLOSED if transfer.prefill_call is not None:
                # Without this message prefill would compute the prompt, and hold its own pages until a timeout.
                await _until_answered(transfer)
                with suppress(MeshError):  # a prefill instance that is gone holds no pages
                    await self._bus.publish(f"{transfer.prefill.subject}.quiesce", quiesce)
            case S.LANDED if transfer.prefill_call is not None:
                transfer.prefill_call.cancel()  # the answer may have been lost

    async def _within(self, seconds: float, what: str, transfer: InboundTransfer, work: Coroutine[Any, Any, T]) -> T:
        late = DeadlineExceeded(f"no {what} prefill {transfer.prefill.instance_id} within {seconds:.3g} s")
        return await transfer.failure.within(seconds, late, work)

    async def _receive(
        self, transfer: InboundTransfer, reserved: Exposed, tokens: range, timeout_s: float
    ) -> AuxRecord:
        await self._offer(transfer, reserved, timeout_s)
        transfer.is_room_open = True
        with step("decode.receive") as receiving:
            receiving.note({"kvmesh.transfer.backend": self._transfer.endpoint.backend})
            return await transfer.landed(reserved.pages, tokens)

    async def _call_prefill(
        self, transfer: InboundTransfer, request: GenerateRequest, route: Route, began_ns: int
    ) -> None:
        life_s = self._bootstrap_timeout_s + self._timeout_s
        prefill = transfer.prefill
        message = PrefillRequest(
            request_id=transfer.engine_id,
            epoch=prefill.epoch,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            room=transfer.room,
            stamp=transfer.stamp,
            token_ids=request.token_ids,
            deadline_unix_ms=min(request.deadline_unix_ms, now_ms() + int(life_s * 1000)),
            sender=self._registration.instance_id,
            sent_unix_ms=now_ms(),
            sampling=request.sampling,
            num_generated=request.num_generated,
            cache_salt=request.cache_salt,
            priority=request.priority,
            adapter=request.adapter,
            verify_kv=self._checksums is not None,
        )
        # a step: prefill's span outlasts it
        with step("decode.call_prefill", start_ns=began_ns, kind=SpanKind.CLIENT) as calling:
            calling.note({"kvmesh.prefill.instance": prefill.instance_id})
            subject = f"{prefill.subject}.prefill"
            accepted = await self._bus.call(subject, message, PrefillAccepted, timeout_s=CALL_TIMEOUT_S)
        route.accepted(accepted.number)

    async def _offer(self, transfer: InboundTransfer, reserved: Exposed, timeout_s: float) -> None:
        """Open the room at a bootstrap replica. Raises: NoBootstrapInstance."""
        opening = OpenRoom(
            room=transfer.room,
            request_id=transfer.engine_id,
            prefill_id=transfer.prefill.instance_id,
            prefill_epoch=transfer.prefill.epoch,
            decode_id=self._registration.instance_id,
            decode_epoch=self._registration.epoch,
            pages=reserved.pages,
            num_cached_pages=reserved.num_computed // self._transfer.endpoint.layout.page_size,
            aux_slot=transfer.slot,
            deadline_unix_ms=now_ms() + int(timeout_s * 1000),
            sender=self._registration.instance_id,
            sent_unix_ms=now_ms(),
        )
        replicas = [r for r in self._registry.book.of_role("bootstrap") if r.is_understood]
        if not replicas:
            raise NoBootstrapInstance("no bootstrap instance is registered")
        # Monotonic, because a jump of the wall clock would free the pages too early or too late.
        transfer.expose(time.monotonic() + timeout_s)

        async def open_room(replica: InstanceRecord) -> None:
            await self._bus.call(f"{replica.subject}.open", opening, RoomOk, timeout_s=OPEN_TIMEOUT_S)

        with step("decode.open_room", kind=SpanKind.CLIENT):
            await self._bootstraps.open(replicas, open_room)

    async def _until_quiet(self, transfer: InboundTransfer, quiesce: Quiesce) -> None:
        """Return when prefill can no longer write into our pages.

        Only prefill's own answer or report proves it; a released transfer handle or a report of its loss does not. A
        prefill without a listener on NATS may be cut off and still write. So may a frozen one in whose place another
        process now answers StaleInstance. Neither posts a write after the offer's deadline, so the pages are safe soon
        after that.
        """
        subject = f"{transfer.prefill.subject}.quiesce"
        gone_since: float | None = None
        while not transfer.is_quiet:
            try:
                await self._bus.call(subject, quiesce, Quiet, timeout_s=QUIESCE_TIMEOUT_S)
            except PeerLost:
                gone_since = gone_since or time.monotonic()
                late_s = time.monotonic() - transfer.offer_end_s
                if time.monotonic() - gone_since > GONE_AFTER_S and late_s > FENCE_MARGIN_S:
                    return
            except MeshError as exc:
                gone_since = None
                log.debug("not quiet yet", extra={"cause": exc.message})
            except Exception:  # must not pin the pages forever
                gone_since = None
                log.exception("quiesce failed, retrying")
            else:
                return
            await asyncio.sleep(QUIESCE_AGAIN_S)


async def _pages_of(transfer: InboundTransfer) -> Exposed:
    asked_ns = time.time_ns()
    reserved = await asyncio.shield(transfer.reserved)  # a refusal does not cancel it: the pages may be offered again
    record_step("decode.reserve", asked_ns, attributes={"kvmesh.pages": len(reserved.pages)})
    return reserved


async def _until_answered(transfer: InboundTransfer) -> None:
    """Wait for prefill's answer: a cancel sent earlier could overtake the request and be ignored."""
    if transfer.prefill_call is not None:
        await ended(transfer.prefill_call)


def _fail_if_refused(transfer: InboundTransfer, _: asyncio.Task[None]) -> None:
    if isinstance(transfer.refusal, Exception):
        transfer.failure.report(transfer.refusal)


def _bootstrap_changed(was: InstanceRecord | None, now: InstanceRecord | None) -> None:
    if now is not None:
        warn_of_protocol(was, now)
