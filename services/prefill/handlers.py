"""What the prefill service answers: a prompt to compute, pages to write into, a transfer to stop."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from opentelemetry import trace

from components.discovery.registry import Registration, Registry
from components.errors import (
    Cancelled,
    MeshError,
    Overloaded,
    PeerLost,
    Rejected,
    TransferFailed,
    reported,
)
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.layout import check_compatible, check_same_adapter
from components.kv_transfer.sender import Sender
from components.lifecycle import Lifecycle, Tally
from components.messaging.bus import Bus
from components.messaging.deadline import remaining_s
from components.messaging.heartbeats import heartbeat_of
from components.messaging.service import Endpoint
from components.routing.local_prefill import PromptLoad, PromptRate
from components.structured.masks import MaskMaker
from components.telemetry.spans import tracer
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.prefill import PrefillAccepted, PrefillRequest, Quiesce, Quiet
from components.wire.rooms import KvComing, PagesOffered, RoomFailed, RoomOk
from components.wire.tokens import unpack_tokens
from engine.log_line import BatchLog
from engine.loop import EngineLoop
from engine.ports import Engine, EngineRequest, Phase, StepOutput, TokenMask
from engine.sampling.wire import sampling_params
from services.prefill.jobs import NEXT, PrefillJob, PrefillState
from services.prefill.rooms import Rooms

log = logging.getLogger(__name__)


class PrefillService:
    """The prompts of this instance."""

    def __init__(
        self,
        bus: Bus,
        registration: Registration,
        registry: Registry,
        engine: EngineLoop,
        transfer: KvTransfer,
        *,
        metrics: WorkerMetrics,
        bootstrap_timeout_s: float | None = None,  # how long a room waits for decode's pages
        masks: MaskMaker | None = None,  # None: prompts with a constraint are refused
    ) -> None:
        self._bus = bus
        self._registration = registration
        self._registry = registry
        self._engine = engine
        self._transfer = transfer
        self._metrics = metrics
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._masks = masks
        self._jobs: dict[str, PrefillJob] = {}
        self._none = asyncio.Event()  # no jobs
        self._none.set()
        self._kept: set[asyncio.Task[None]] = set()  # words to others, and peers to forget
        self._rooms = Rooms(bus, registry, self._keep)
        self._tally = Tally(NEXT)
        self._rate = PromptRate()
        self._accepted = 0  # prompts
        self.draining = False
        engine.on_output(self._stepped)
        engine.on_output(BatchLog(engine.engine.kv_region.layout.page_size, more=self._transfers).stepped)
        metrics.show_queues(self._tally)
        registry.book.subscribe(self._instance_changed)

    def _transfers(self) -> dict[str, float]:
        """For the line of a batch: prompts that are computed, and whose pages are being sent."""
        return {"#transfer-req": self._tally[PrefillState.INFLIGHT]}

    @property
    def num_jobs(self) -> int:
        """Prompts being computed or sent."""
        return len(self._jobs)

    def endpoints(self) -> list[Endpoint]:
        """The calls of a transfer's life."""
        return [
            Endpoint("prefill", PrefillRequest, self.prefill, immediate=True),
            Endpoint("pages", PagesOffered, self.pages, immediate=True),
            Endpoint("quiesce", Quiesce, self.quiesce),
            Endpoint("room_failed", RoomFailed, self.room_failed, immediate=True),
        ]

    async def prefill(self, request: PrefillRequest) -> PrefillAccepted:
        """Start computing. Raises: what makes decode go elsewhere."""
        try:
            accepted = self._begin(request)
        except MeshError:
            if request.request_id not in self._jobs:
                self._rooms.end(request.request_id)
            raise
        if (offer := self._rooms.take(request.request_id)) is not None:
            with suppress(TransferFailed):  # decode was told
                await self.pages(offer)
        return accepted

    def _begin(self, request: PrefillRequest) -> PrefillAccepted:
        """Raises: as `prefill`."""
        self._check(request)
        span = tracer.start_span("prefill.request", kind=trace.SpanKind.SERVER)
        try:
            return self._accept(request, span)
        except BaseException:
            span.end()
            raise

    def _check(self, request: PrefillRequest) -> None:
        """Raises: what makes decode go elsewhere."""
        self._registration.check_epoch(request.epoch)
        remaining_s(request.deadline_unix_ms)
        if self.draining:
            raise Overloaded("this prefill instance is leaving")
        self._check_pair(request)
        if request.sampling.constraint is not None and self._masks is None:
            raise Rejected("this instance has no masks for constraints")
        if request.request_id in self._jobs or self._rooms.is_over(request.request_id):
            raise Rejected(f"request id {request.request_id!r} is in use, or was", param="request_id")

    def _check_pair(self, request: PrefillRequest) -> None:
        """Raises: IncompatibleLayout, naming both values: what we compute would be of no use there."""
        if request.layout is not None:
            check_compatible(self._transfer.endpoint.layout, request.layout)
        ours = self._engine.engine.adapters.get(request.adapter)
        if ours is not None and request.adapter_identity:
            check_same_adapter(request.adapter, ours, request.adapter_identity)

    async def pages(self, offer: PagesOffered) -> RoomOk:
        """Decode's pages for a room; they may come before its question. Raises: TransferFailed, when nothing will be written
        there; decode hears of it.
        """
        if offer.request_id not in self._jobs and self._rooms.hold(offer):
            return RoomOk(room=offer.room)
        try:
            self._offered(offer)
        except TransferFailed as exc:
            self._rooms.close_later(offer)
            await self._rooms.tell_decode(offer, exc)
            raise
        return RoomOk(room=offer.room)

    def _offered(self, offer: PagesOffered) -> None:
        job = self._jobs.get(offer.request_id)
        if job is None or job.request.room != offer.room:
            raise TransferFailed(f"room {offer.room} is over on this prefill instance")
        record = self._registry.book.find(offer.decode_id, offer.decode_epoch)
        if record is None or record.kv is None:
            raise TransferFailed(f"decode instance {offer.decode_id} is not registered with epoch {offer.decode_epoch}")
        limit, num_pages = record.kv.num_pages, record.kv.layout.pages_for(job.num_tokens)  # decode's, of its size
        if len(offer.pages) != num_pages or not all(0 <= page < limit for page in offer.pages):
            raise TransferFailed(f"the offer must name {num_pages} pages below {limit}")
        if not 0 <= offer.num_cached_pages <= num_pages:
            raise TransferFailed(f"{offer.num_cached_pages} cached pages of {num_pages}")
        if not 0 <= offer.aux_slot < record.kv.aux_slots:
            raise TransferFailed(f"aux slot {offer.aux_slot} is out of range")
        job.offered(offer, record.kv)
        if job.offer is not None and job.offer.bootstrap_id != offer.bootstrap_id:  # two replicas opened the room
            self._rooms.close_later(offer)

    async def quiesce(self, request: Quiesce) -> Quiet:
        """Stop a transfer; the answer means that nothing of it is in flight and nothing will be posted."""
        job = self._jobs.get(request.request_id)
        if job is not None:
            kind = Cancelled if request.cancelled else TransferFailed
            job.failure.tell(kind(request.cause))
            await asyncio.wait((job.task,))
        self._rooms.end(request.request_id)
        return Quiet(request_id=request.request_id)

    async def room_failed(self, failed: RoomFailed) -> RoomOk:
        """The bootstrap service knows that this transfer will not complete."""
        job = self._jobs.get(failed.request_id)
        if job is not None and job.request.room == failed.room:
            job.failure.tell(reported(failed.error, TransferFailed)(failed.cause))
        return RoomOk(room=failed.room)

    def heartbeat(self) -> Heartbeat:
        """What this instance says of itself."""
        me = self._registration
        prompts = PromptLoad(sum(job.tokens_left for job in self._jobs.values()), self._rate.tokens_per_s)
        return heartbeat_of(
            me.instance_id,
            me.epoch,
            self._engine.stats,
            prompts,
            draining=self.draining,
            accepted=self._accepted,
            num_requests=self.num_jobs,
        )

    async def drained(self) -> None:
        """Wait for the jobs in flight."""
        await self._none.wait()
        self._rooms.close()
        if self._kept:
            await asyncio.wait(self._kept)

    def stop_all(self, cause: str) -> None:
        """Give up every job: decode computes those prompts itself."""
        for job in self._jobs.values():
            job.failure.tell(PeerLost(cause))

    def _accept(self, request: PrefillRequest, span: trace.Span) -> PrefillAccepted:
        blocks = self._engine.engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter)
        prompt = EngineRequest(
            request_id=request.request_id,
            token_ids=unpack_tokens(request.token_ids),
            sampling=sampling_params(request.sampling),
            phase=Phase.PREFILL,
            cache_salt=request.cache_salt,
            num_generated=request.sampling.num_generated,
            priority=request.priority,
            adapter=request.adapter,
            blocks=blocks,
        )
        num_tokens = len(prompt.token_ids)
        hit = self._engine.engine.peek_prefix(blocks)
        checksums = self._checksums if request.verify_kv else None
        job = PrefillJob(
            request=request,
            sender=Sender(
                self._transfer,
                request.request_id,
                num_tokens,
                checksums=checksums,
                bootstrap_timeout_s=self._bootstrap_timeout_s,
                announce=self._announce,
            ),
            lifecycle=Lifecycle(f"prefill {request.request_id}", NEXT, PrefillState.BOOTSTRAPPING, self._tally),
            num_tokens=num_tokens,
            span=span,
            submitted_ns=time.time_ns(),
            step_s=lambda: self._engine.stats.step_s,
            num_computed=hit,  # what is cached is no work, and must not look like a queue
        )
        self._jobs[request.request_id] = job
        self._accepted += 1
        self._none.clear()
        if request.sampling.constraint is None:
            self._submit(job, prompt)
        job.task = asyncio.create_task(self._run(job, prompt), name=f"prefill {request.request_id}")
        return PrefillAccepted(request_id=request.request_id, number=self._accepted)

    def _submit(self, job: PrefillJob, prompt: EngineRequest) -> None:
        submitted = self._engine.post(lambda engine: engine.submit(prompt))
        submitted.add_done_callback(lambda done: _pass_on_failure(done, job))

    async def _mask_of(self, request: PrefillRequest, token_ids: Sequence[int]) -> TokenMask | None:
        """What the first token may be. Raises: Rejected."""
        assert self._masks is not None, "such a prompt was not accepted"
        with tracer.start_as_current_span("prefill.compile"):
            return await self._masks.mask_of(request.sampling, token_ids)

    @cached_property
    def _checksums(self) -> PageChecksums:
        """Of this instance's pages. Raises: Rejected, when they cannot be read."""
        return PageChecksums(self._engine.engine.kv_region)

    async def _announce(self, offer: PagesOffered) -> None:
        """Decode looks for the end of a transfer more often when it is near; without this word it takes milliseconds longer."""
        decode = self._registry.book.find(offer.decode_id, offer.decode_epoch)
        if decode is not None:
            with suppress(MeshError):
                await self._bus.publish(f"{decode.subject}.kv_coming", KvComing(room=offer.room))

    async def _run(self, job: PrefillJob, prompt: EngineRequest) -> None:
        request = job.request

        async def work() -> None:
            if request.sampling.constraint is not None:
                self._submit(job, msgspec.structs.replace(prompt, mask=await self._mask_of(request, prompt.token_ids)))
            await job.sender.run()

        try:
            outcome = await job.run(work())
            if job.offer is not None:
                self._rooms.close_later(job.offer)
            if outcome is None:
                self._metrics.transferred(job.sender.num_bytes, job.sender.duration_s)
            elif isinstance(outcome, Cancelled):
                self._metrics.transfer_cancelled()
            else:
                self._metrics.transfer_failed()
                await self._rooms.tell_decode(request, outcome)
        finally:
            self._forget(job)

    def _forget(self, job: PrefillJob) -> None:
        """Nothing of this job is in flight: its pages go back, what was computed stays in the prefix cache."""
        request_id = job.request.request_id
        job.over()
        self._jobs.pop(request_id, None)
        self._rooms.end(request_id)
        if not self._jobs:
            self._none.set()

        def forget(engine: Engine) -> None:
            engine.cancel(request_id)
            engine.release(request_id)

        self._engine.call(forget)

    def _stepped(self, output: StepOutput) -> None:
        self._metrics.record(output.stats)
        self._rate.stepped(output.stats.prompt_tokens, output.stats.step_s)
        for event in output.computed:
            if (job := self._jobs.get(event.request_id)) is not None:
                job.computed(event)
        for failed in output.failed:
            if (job := self._jobs.get(failed.request_id)) is not None:
                job.failure.tell(failed.error)

    def _instance_changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is None or was.role != "decode" or (now is not None and now.epoch == was.epoch):
            return
        for job in self._jobs.values():
            if (job.request.decode_id, job.request.decode_epoch) == (was.instance_id, was.epoch):
                job.failure.tell(PeerLost(f"decode instance {was.instance_id} is gone"))
        if was.kv is not None and (now is None or now.kv is None or now.kv.agent != was.kv.agent):
            self._keep(self._transfer.disconnect(was.kv.agent))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        task.add_done_callback(_log_failure)


def _pass_on_failure(done: asyncio.Future[None], job: PrefillJob) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        job.failure.tell(error if isinstance(error, MeshError) else TransferFailed(f"prefill failed: {error!r}"))


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("neither told nor forgotten", extra={"cause": str(error)})
