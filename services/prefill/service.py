"""The prefill service: accepts prompts and offers of decode's pages, and stops transfers."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import msgspec
from opentelemetry import trace

from components.aio import BackgroundTasks, exception_of
from components.discovery.registry import Registration, Registry
from components.errors import Cancelled, MeshError, Overloaded, PeerLost, Rejected, TransferFailed
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.writes import Writes
from components.lifecycle import Tally
from components.messaging.bus import Bus
from components.messaging.call_server import Endpoint
from components.messaging.heartbeat_sender import heartbeat_of
from components.routing.policy import PromptLoad, PromptRate
from components.structured.mask_maker import MaskMaker
from components.telemetry.figures import Figures, queues_of
from components.telemetry.spans import exemplar_of, step, tracer
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.prefill import KvComing, PagesOffered, PrefillAccepted, PrefillRequest, Quiesce, Quiet, RoomOk
from components.wire.sampling import Constraint
from components.wire.status import RoomStatus
from components.wire.tokens import unpack_tokens
from engine.loop.engine_loop import EngineLoop
from engine.loop.log_line import BatchLog
from engine.ports import Engine, EngineRequest, Exposed, Phase, StepOutput, TokenMask
from services.prefill.outbound import NEXT, OutboundState, OutboundTransfer
from services.prefill.rooms import Rooms
from services.worker_requests import check_addressed, engine_request

log = logging.getLogger(__name__)


class PrefillService:
    """Computes prompts for decode instances. Decode checks KV layout and adapters when it chooses an instance."""

    def __init__(
        self,
        bus: Bus,
        registration: Registration,
        registry: Registry,
        engine: EngineLoop,
        transfer: KvTransfer,
        *,
        masks: MaskMaker,
        metrics: WorkerMetrics,
        writes: Writes,  # of all ranks
        bootstrap_timeout_s: float,  # for decode's offer
    ) -> None:
        self._bus = bus
        self._registration = registration
        self._registry = registry
        self._engine = engine
        self._transfer = transfer
        self._writes = writes
        self._metrics = metrics
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._masks = masks
        self._outbound: dict[str, OutboundTransfer] = {}  # by request id
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = BackgroundTasks()  # sends messages, disconnects peers
        self._rooms = Rooms(bus, registry, self._in_background)
        self._tally = Tally(NEXT)
        self._rate = PromptRate()
        self._num_accepted = 0
        self.draining = False
        engine.on_output(self._stepped)
        engine.report(BatchLog(engine.engine.kv_region.layout.page_size, more=self._transfers_to_log).stepped)
        registry.book.follow("decode", self._instance_changed)

    def _transfers_to_log(self) -> dict[str, float]:
        return {"#transfer-req": self._tally[OutboundState.INFLIGHT]}

    @property
    def num_transfers(self) -> int:
        return len(self._outbound)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("prefill", PrefillRequest, self.prefill, runs_inline=True),
            Endpoint("pages", PagesOffered, self.pages, runs_inline=True),
            Endpoint("quiesce", Quiesce, self.quiesce),
        ]

    async def prefill(self, request: PrefillRequest) -> PrefillAccepted:
        """Start computing. Raises: MeshError; decode then asks another instance, or computes the prompt itself."""
        if (begun := self._begun(request)) is not None:
            return PrefillAccepted(request_id=request.request_id, number=begun.number)
        try:
            accepted = self._begin(request)
        except MeshError:
            if request.request_id not in self._outbound:
                self._rooms.end(request.request_id)
            raise
        if (offer := self._rooms.take_early(request.request_id, request.room)) is not None:
            with suppress(TransferFailed):  # `pages` has already notified decode
                await self.pages(offer)
        return accepted

    def _begin(self, request: PrefillRequest) -> PrefillAccepted:
        self._check(request)
        span = tracer.start_called_span("prefill.request", self._registration.instance_id)
        try:
            return self._accept(request, span)
        except BaseException:
            span.end()
            raise

    def _begun(self, request: PrefillRequest) -> OutboundTransfer | None:
        """Return the transfer of a repeated call, whose first answer was lost. A refusal would end the transfer."""
        transfer = self._outbound.get(request.request_id)
        return transfer if transfer is not None and _call_of(transfer.request) == _call_of(request) else None

    def _check(self, request: PrefillRequest) -> None:
        check_addressed(request, self._registration, draining=self.draining)
        if request.request_id in self._outbound or self._rooms.has_ended(request.request_id):
            raise Rejected(f"request id {request.request_id!r} is in use, or was a moment ago", param="request_id")
        if self._registry.book.find("decode", request.decode_id, request.decode_epoch) is None:
            # refuse now, so that decode can try an instance that sees it in etcd; we would refuse its offer later
            raise Overloaded(f"decode instance {request.decode_id} is not registered with epoch {request.decode_epoch}")

    async def pages(self, offer: PagesOffered) -> RoomOk:
        """Accept an offer of decode's pages, which may arrive before the request.

        Raises: TransferFailed, after notifying decode; no write into those pages will follow.
        """
        if offer.request_id not in self._outbound and self._rooms.keep_early(offer):
            return RoomOk(room=offer.room)
        try:
            self._take_offer(offer)
        except TransferFailed as exc:
            self._rooms.close_later(offer)
            await self._rooms.notify_decode(offer, exc)
            raise
        return RoomOk(room=offer.room)

    def _take_offer(self, offer: PagesOffered) -> None:
        transfer = self._outbound.get(offer.request_id)
        if transfer is None or transfer.request.room != offer.room:
            raise TransferFailed(
                f"this prefill instance does not hold room {offer.room}: its request has ended or names another room, "
                "or too many offers are waiting"
            )
        if (offer.decode_id, offer.decode_epoch) != (transfer.request.decode_id, transfer.request.decode_epoch):
            # KV goes only to the instance that sent the request
            raise TransferFailed(f"decode instance {offer.decode_id} offers pages for a request of another instance")
        record = self._registry.book.find("decode", offer.decode_id, offer.decode_epoch)
        if record is None or record.kv is None:
            raise TransferFailed(f"decode instance {offer.decode_id} is not registered with epoch {offer.decode_epoch}")
        # Both count pages of decode's size.
        limit, num_pages = record.kv.num_pages, record.kv.layout.pages_for(transfer.num_tokens)
        if len(offer.pages) != num_pages or not all(0 <= page < limit for page in offer.pages):
            raise TransferFailed(f"the offer must have {num_pages} page ids below {limit}")
        if not 0 <= offer.num_cached_pages <= num_pages:
            raise TransferFailed(
                f"the offer has {offer.num_cached_pages} cached pages, but the prompt has {num_pages} pages"
            )
        if not 0 <= offer.aux_slot < record.kv.aux_slots:
            raise TransferFailed(f"aux slot {offer.aux_slot} is out of range")
        transfer.offered(offer, record.kv)
        # Two replicas may have opened the room. The end of the transfer closes only that of the first offer.
        if transfer.offer is not None and transfer.offer.bootstrap_id != offer.bootstrap_id:
            self._rooms.close_later(offer)

    async def quiesce(self, request: Quiesce) -> Quiet:
        """Stop a transfer. Once this has been answered, no write of it is in flight, and none will be posted.

        Raises: StaleInstance, for the transfer of another process under this instance id: that one may still write.
        """
        if request.epoch:  # a decode instance of an earlier release sends no epoch
            self._registration.check_epoch(request.epoch)
        transfer = self._outbound.get(request.request_id)
        if transfer is not None:
            kind = Cancelled if request.cancelled else TransferFailed
            transfer.failure.report(kind(request.cause))
            await asyncio.wait((transfer.task,))
        self._rooms.end(request.request_id)
        return Quiet(request_id=request.request_id)

    def heartbeat(self) -> Heartbeat:
        me = self._registration
        prompts = PromptLoad(sum(each.tokens_left for each in self._outbound.values()), self._rate.tokens_per_s)
        return heartbeat_of(
            me.instance_id,
            me.epoch,
            self._engine.stats,
            prompts,
            draining=self.draining,
            is_stepping=self._engine.is_stepping,
            accepted=self._num_accepted,
            num_requests=self.num_transfers,
        )

    def show(self, figures: Figures) -> None:
        figures.is_draining = lambda: self.draining
        figures.queues = lambda: queues_of((t.lifecycle for t in self._outbound.values()), self._tally.states)
        figures.rooms = self._rooms_shown

    def _rooms_shown(self) -> list[RoomStatus]:
        now_s = time.monotonic()
        return [
            RoomStatus(
                room=each.request.room,
                request_id=request_id,
                state=str(each.lifecycle.state),
                age_s=now_s - each.began_s,
                peer=each.request.decode_id,
            )
            for request_id, each in self._outbound.items()
        ]

    async def drained(self) -> None:
        """Wait until all transfers have ended and all messages are sent."""
        await self._idle.wait()
        self._rooms.send_closes()
        await self._tasks.drain()

    def stop_all(self, cause: str) -> None:
        for transfer in self._outbound.values():
            transfer.failure.report(PeerLost(cause))

    def _accept(self, request: PrefillRequest, span: trace.Span) -> PrefillAccepted:
        blocks = self._engine.engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter)
        prompt = engine_request(
            request, request.request_id, unpack_tokens(request.token_ids), blocks, phase=Phase.PREFILL
        )
        transfer = OutboundTransfer(
            self._transfer,
            request,
            span,
            num_cached=self._engine.engine.peek_prefix(blocks),
            writes=self._writes,
            checksums=self._checksums if request.verify_kv else None,
            tally=self._tally,
            bootstrap_timeout_s=self._bootstrap_timeout_s,
            announce=self._announce,
            step_s=lambda: self._engine.stats.step_s,
        )
        self._outbound[request.request_id] = transfer
        self._num_accepted += 1
        transfer.number = self._num_accepted
        self._idle.clear()
        if request.sampling.constraint is None:
            self._submit(transfer, prompt)
        transfer.task = asyncio.create_task(self._run(transfer, prompt), name=f"prefill {request.request_id}")
        return PrefillAccepted(request_id=request.request_id, number=transfer.number)

    def _submit(self, transfer: OutboundTransfer, prompt: EngineRequest) -> None:
        submitted = self._engine.between_steps(lambda engine: engine.submit(prompt))
        submitted.add_done_callback(lambda done: _fail_unless_submitted(done, transfer))

    async def _mask_of(self, constraint: Constraint, prompt: EngineRequest) -> TokenMask:
        """The mask of the first token. Raises: Rejected."""
        with step("prefill.compile"):
            return await self._masks.mask_of(constraint, prompt.token_ids, prompt.num_generated)

    @cached_property
    def _checksums(self) -> PageChecksums:
        """Raises: Rejected, if this instance's pages cannot be read."""
        return PageChecksums(self._engine.engine.kv_region, self._writes.connections)

    async def _announce(self, offer: PagesOffered, last: Exposed) -> None:
        """Notify decode that the last pages follow. It may then send the first token, and polls more often.

        Without this message a transfer takes milliseconds longer.
        """
        decode = self._registry.book.find("decode", offer.decode_id, offer.decode_epoch)
        if decode is not None:
            with suppress(MeshError):
                coming = KvComing(
                    room=offer.room,
                    request_id=offer.request_id,
                    first_token=last.first_token,
                    num_cached_tokens=last.num_cached_tokens,
                )
                await self._bus.publish(f"{decode.subject}.kv_coming", coming)
                await asyncio.sleep(0)  # let nats-py send it now, because the write that follows may block this thread

    async def _run(self, transfer: OutboundTransfer, prompt: EngineRequest) -> None:
        request, constraint = transfer.request, prompt.sampling.constraint

        async def submit_with_mask(constraint: Constraint) -> None:
            mask = await self._mask_of(constraint, prompt)
            self._submit(transfer, msgspec.structs.replace(prompt, mask=mask))

        try:
            outcome = await transfer.run(None if constraint is None else partial(submit_with_mask, constraint))
            if transfer.offer is not None:
                self._rooms.close_later(transfer.offer)
            if outcome is None:
                self._metrics.transferred(
                    request.decode_id, transfer.num_bytes, transfer.duration_s, exemplar_of(transfer.span)
                )
            else:
                self._metrics.transfer_failed(request.decode_id, outcome)
                if not isinstance(outcome, Cancelled):
                    await self._rooms.notify_decode(request, outcome)
        finally:
            self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        """Release the pages of a transfer that has no write in flight. Computed blocks stay in the prefix cache."""
        self._outbound.pop(request_id, None)
        self._rooms.end(request_id)
        if not self._outbound:
            self._idle.set()

        def forget(engine: Engine) -> None:
            engine.cancel(request_id)
            engine.release(request_id)

        self._engine.between_steps(forget, light=True)

    def _stepped(self, output: StepOutput) -> None:
        self._metrics.record(output.stats)
        self._rate.stepped(output.stats.prompt_tokens, output.stats.step_s)
        for event in output.computed:
            if (transfer := self._outbound.get(event.request_id)) is not None:
                transfer.computed(event)
        for failed in output.failed:
            if (transfer := self._outbound.get(failed.request_id)) is not None:
                transfer.failure.report(failed.error)

    def _instance_changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        """Fail the transfers to a decode instance whose record has left etcd. Prefill detects lost peers in no other way."""
        if was is None or (now is not None and now.epoch == was.epoch):
            return
        for transfer in self._outbound.values():
            if (transfer.request.decode_id, transfer.request.decode_epoch) == (was.instance_id, was.epoch):
                transfer.failure.report(PeerLost(f"decode instance {was.instance_id} is gone"))
        if was.kv is not None and (now is None or now.kv is None or now.kv.agent != was.kv.agent):
            self._in_background(self._writes.disconnect(was.kv.agent), f"disconnect {was.instance_id}")

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.start(work, name).add_done_callback(_log_failure)


def _call_of(request: PrefillRequest) -> tuple[str, ...]:
    return request.epoch, request.room, request.decode_id, request.decode_epoch


def _fail_unless_submitted(done: asyncio.Future[None], transfer: OutboundTransfer) -> None:
    if (error := exception_of(done)) is not None:
        transfer.failure.report(error if isinstance(error, MeshError) else TransferFailed(f"prefill failed: {error!r}"))


def _log_failure(done: asyncio.Task[None]) -> None:
    if (error := exception_of(done)) is not None:
        log.warning("background task failed", extra={"task": done.get_name(), "cause": str(error)})
