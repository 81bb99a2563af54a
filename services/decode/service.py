"""The decode service: takes requests, gets their KV from prefill or computes it, and streams tokens."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from prometheus_client import Counter

from components.discovery.registry import Registration
from components.errors import (
    Cancelled,
    DeadlineExceeded,
    KvUnavailable,
    MeshError,
    PeerBroken,
    PeerLost,
    PrefillLost,
    Rejected,
    UnknownModel,
)
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.fleet import Fleet
from components.messaging.heartbeat_sender import heartbeat_of
from components.messaging.outbox import OutStream
from components.routing.policy import PromptLoad, PromptRate
from components.routing.router import Route, RouteChoice
from components.structured.masks import MaskMaker
from components.telemetry.exemplars import exemplar_of
from components.telemetry.figures import Figures, Queue, queues_of
from components.telemetry.light_span import Step
from components.telemetry.on_demand import OnDemand
from components.telemetry.spans import NO_STEP, record_lost, step, tracer, use_span
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.generate import MAX_STREAM_ID, CancelStreams, GenerateAccepted, GenerateRequest, StreamsCancelled
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord
from components.wire.prefill import KvComing, RoomFailed, RoomOk
from components.wire.sampling import Constraint
from components.wire.tokens import unpack_tokens
from engine.loop.engine_loop import EngineLoop
from engine.loop.log_line import BatchLog
from engine.ports import Engine, EngineRequest, Phase, StepOutput, TokenMask
from engine.sampling.bounds import check_branches
from services.decode.config import OnTransferFailure
from services.decode.embedding import EmbeddingService
from services.decode.inbound import InboundState, InboundTransfer
from services.decode.prefill_choice import Local, PrefillChoice, Reason
from services.decode.prefill_client import PrefillClient
from services.decode.requests import (
    SPAN_LOCAL_PREFILL,
    ActiveRequest,
    ActiveRequests,
    RequestState,
)
from services.worker import check_addressed, check_model

log = logging.getLogger(__name__)

PROMPT_LOGPROBS: Final = Local(Reason.PROMPT_LOGPROBS, "the prompt's log-probabilities are asked for")
LIGHT_TOKENS: Final = 4096  # checking and hashing so many takes less than a millisecond
SETTLE_S: Final = 1.0  # when this process leaves: for prefill workers to answer that they write no more


class DecodeService:
    def __init__(
        self,
        registration: Registration,
        engine: EngineLoop,
        prefill: PrefillClient,
        prefills: Fleet,
        active: ActiveRequests,
        *,
        metrics: WorkerMetrics,
        model: str,
        max_local_prefill: int,
        local_prefill_on_queue: bool,
        on_transfer_failure: OnTransferFailure = "recompute",
        masks: MaskMaker | None = None,  # None: requests with a constraint are refused
    ) -> None:
        self._registration = registration
        self._engine = engine
        self._prefill = prefill
        self._prefills = prefills
        self._active = active
        self._metrics = metrics
        self._model = model
        self._on_transfer_failure = on_transfer_failure
        self._masks = masks
        self._rate = PromptRate()
        self._num_accepted = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._settling: set[asyncio.Task[None]] = set()  # of those: the request is over, its pages are pinned
        self._choice = PrefillChoice(
            prefills,
            engine.engine,
            prefill,
            self._prompts,
            model=model,
            max_local_prefill=max_local_prefill,
            local_prefill_on_queue=local_prefill_on_queue,
        )
        self.embedding = EmbeddingService(registration, engine, model)
        self._local = Counter(
            "kvmesh_prompts_computed_on_decode",
            "Prompts that decode computed itself, by reason.",
            ["reason"],
            registry=metrics.registry,
        )
        for reason in Reason:
            self._local.labels(reason)
        OnDemand(metrics.registry).gauge(
            "kvmesh_prefill_instances_incompatible",
            "Prefill instances that this process never uses: other KV layout, backend or adapter weights.",
            lambda: self._choice.num_incompatible,
        )
        active.outbox.on_gone(self._frontend_gone)
        engine.on_output(self._stepped)
        engine.on_output(BatchLog(engine.engine.kv_region.layout.page_size, more=self._transfers_to_log).stepped)
        prefills.alive.on_lost(prefill.instance_lost)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("generate", GenerateRequest, self.generate, immediate=True),
            Endpoint("cancel", CancelStreams, self.cancel, immediate=True),
            self._active.outbox.endpoint(),
            Endpoint("room_failed", RoomFailed, self.room_failed, immediate=True),
            Endpoint("kv_coming", KvComing, self.kv_coming, immediate=True),
            self._choice.endpoint(),
            *self.embedding.endpoints(),
        ]

    async def generate(self, request: GenerateRequest) -> GenerateAccepted:
        """Accept a request; its tokens follow as frames. Raises: MeshError; the frontend then tries another instance."""
        left_s = check_addressed(request, self._registration, draining=self.draining)
        check_model(request.model, self._model)
        if request.adapter and request.adapter not in self._engine.engine.adapters:
            raise UnknownModel(f"this instance has no adapter {request.adapter!r} of {self._model!r}")
        engine_id = f"{request.request_id}.{request.stream_id}"
        if self._active.find(engine_id) is not None:
            raise Rejected(f"request id {engine_id!r} is in use", param="request_id")
        check_branches(request.sampling)
        num_branches = request.sampling.n
        if not 0 <= request.stream_id <= MAX_STREAM_ID - num_branches:
            raise Rejected(f"stream id {request.stream_id} is out of range", param="stream_id")
        active = ActiveRequest(
            engine_id=engine_id,
            request=request,
            token_ids=unpack_tokens(request.token_ids),
            blocks=self._engine.engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter),
            streams={i: OutStream(request.reply_to, request.stream_id + i) for i in range(num_branches)},
            span=tracer.start_called_span("decode.request", self._registration.instance_id),
            lifecycle=self._active.lifecycle(engine_id),
        )
        active.span.set_attributes(
            {"kvmesh.decode.instance": self._registration.instance_id, "kvmesh.prompt_tokens": len(active.token_ids)}
        )
        # A frontend that is gone cancels nothing.
        expired = DeadlineExceeded("the request's deadline passed")
        active.expiry = asyncio.get_running_loop().call_later(left_s, self._stop, active, expired)
        self._active.add(active)
        self._num_accepted += 1
        self._keep(active.engine_id, self._run(active))
        return GenerateAccepted(request_id=request.request_id, number=self._num_accepted)

    async def cancel(self, request: CancelStreams) -> StreamsCancelled:
        count = 0
        for stream_id in request.stream_ids:
            found = self._active.of_stream(request.reply_to, stream_id)
            if found is not None:
                self._stop_branch(*found)
                count += 1
        return StreamsCancelled(count=count)

    async def room_failed(self, failed: RoomFailed) -> RoomOk:
        self._prefill.room_failed(failed)
        return RoomOk(room=failed.room)

    async def kv_coming(self, coming: KvComing) -> RoomOk:
        self._prefill.kv_coming(coming)
        return RoomOk(room=coming.room)

    def heartbeat(self) -> Heartbeat:
        me = self._registration
        return heartbeat_of(
            me.instance_id,
            me.epoch,
            self._engine.stats,
            self._prompts(),
            draining=self.draining,
            accepted=self._num_accepted,
            num_requests=sum(len(active.streams) for active in self._active.all()) + len(self.embedding),
        )

    def show(self, figures: Figures) -> None:
        figures.is_draining = lambda: self.draining
        figures.queues = self._queues
        figures.rooms = self._prefill.rooms
        figures.breakers = self._breakers
        figures.heartbeat_ages_s = self._prefills.alive.ages_s
        self._metrics.num_exposed_pages = lambda: self._prefill.num_exposed_pages

    def _queues(self) -> dict[str, Queue]:
        """An accepted request with a transfer under way is in the queue of the transfer alone."""

        def is_alone(active: ActiveRequest) -> bool:
            return active.lifecycle.state is not RequestState.ACCEPTED or not self._prefill.is_under_way(
                active.engine_id
            )

        alone = (active.lifecycle for active in self._active.all() if is_alone(active))
        return queues_of(alone, self._active.tally.states) | self._prefill.queues()

    def _breakers(self) -> dict[str, str]:
        prefills = {i: str(state) for i, state in self._prefills.router.health.states().items()}
        return prefills | self._prefill.bootstrap_breakers()

    @property
    def draining(self) -> bool:
        return self.embedding.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.embedding.draining = draining

    async def drained(self) -> None:
        """Wait until every request is answered.

        Pinned pages get SETTLE_S, in which a prefill that lives answers. One that is dead does not, and its offer may last
        for a minute. Nothing reuses the pages any more: their memory goes with this process.
        """
        await self._active.drained()
        await self.embedding.drained()
        while running := set(self._tasks.values()) - self._settling:
            await asyncio.wait(running)
        if self._settling:
            await asyncio.wait(self._settling, timeout=SETTLE_S)
        for task in self._settling:
            task.cancel()

    def _frontend_gone(self, reply_to: str) -> None:
        streams = self._active.of_frontend(reply_to)
        if streams:
            log.warning("frontend is gone, ending its streams", extra={"subject": reply_to, "streams": len(streams)})
        for active in streams:
            self._stop(active, Cancelled("the frontend has gone"))

    def stop_all(self, cause: str) -> None:
        for active in self._active.all():
            self._stop(active, PeerLost(cause))
        self.embedding.stop_all(cause)

    async def _run(self, active: ActiveRequest) -> None:
        with use_span(active.span):
            try:
                if (constraint := active.request.sampling.constraint) is not None:
                    active.mask = await self._mask_of(constraint, active)
                prefill = await self._choose(active)
                if prefill is None:
                    active.enter(RequestState.WAITING)
                    self._submit(active, Phase.FULL)
                else:
                    await self._fetch(active, *prefill)
            except MeshError as exc:
                self._active.fail(active, exc)
            except Exception as exc:
                log.exception("request failed")
                self._engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
                self._active.fail(active, PeerLost(f"decode failed: {type(exc).__name__}"))

    async def _mask_of(self, constraint: Constraint, active: ActiveRequest) -> TokenMask:
        """Called before pages are reserved or prefill is asked: a request that waits for its mask must hold neither.

        Raises: Rejected.
        """
        if self._masks is None:
            raise Rejected("this instance has no masks for constraints")
        with step("decode.compile", active.span):
            return await self._masks.mask_of(constraint, active.token_ids, active.request.num_generated)

    async def _choose(self, active: ActiveRequest) -> tuple[InstanceRecord, RouteChoice] | None:
        """Choose a prefill instance. Returns None if the prompt should be computed here."""
        request = active.request
        with step("decode.lookup", active.span) as lookup:
            hit = self._engine.engine.peek_prefix(active.blocks)
            lookup.note({"kvmesh.cached_tokens": hit})
        active.num_cached = hit
        with step("decode.choose_prefill", active.span) as choosing:
            if active.request.sampling.prompt_logprobs is not None:
                self._locally(PROMPT_LOGPROBS, active, choosing)
                return None
            chosen = await self._choice.choose(
                active.blocks,
                len(active.token_ids) - hit,
                adapter=request.adapter,
                session=request.session,
                explain=choosing is not NO_STEP,
            )
            if isinstance(chosen, Local):
                self._locally(chosen, active, choosing)
                return None
            active.prefill = chosen.instance_id
            choosing.note({"kvmesh.prefill.instance": chosen.instance_id, **chosen.facts()})
            return self._choice.record_of(chosen), chosen

    def _locally(self, choice: Local, active: ActiveRequest, choosing: Step) -> None:
        active.why_local = choice.why
        choosing.note({"kvmesh.prefill.why_local": choice.why})
        self._local.labels(choice.reason).inc()

    def _transfers_to_log(self) -> dict[str, float]:
        total_pages = max(1, self._engine.stats.total_pages)
        return {
            "#transfer-req": self._prefill.tally[InboundState.TRANSFER],
            "pre-allocated usage": round(self._prefill.num_reserved_pages / total_pages, 2),
        }

    def _prompts(self) -> PromptLoad:
        """Return the prompt tokens queued here, and the speed of their computation."""
        queued = 0
        if self._active.tally[RequestState.WAITING]:  # rare if there are prefill instances
            waiting = (a for a in self._active.all() if a.lifecycle.state is RequestState.WAITING)
            queued = sum(len(active.token_ids) - active.num_cached for active in waiting)
        return PromptLoad(queued, self._rate.tokens_per_s)

    async def _fetch(self, active: ActiveRequest, prefill: InstanceRecord, chosen: RouteChoice) -> None:
        """Let `prefill` compute the prompt. If that fails, compute it here: the client sees only latency.

        Raises: KvUnavailable instead, if `on_transfer_failure` is "fail" and the request has no token yet.
        """
        tokens = len(active.token_ids)
        router = self._prefills.router
        pages = router.pages_for(prefill.instance_id, tokens)
        route = router.send(chosen, tokens - chosen.cached_tokens, pages)
        try:
            with self._prefills.alive.watching(prefill.instance_id):
                await self._fetch_by(route, active, prefill)
        finally:
            route.over()

    async def _fetch_by(self, route: Route, active: ActiveRequest, prefill: InstanceRecord) -> None:
        transfer = self._prefill.begin(active.engine_id, prefill)
        try:
            self._prefill.ask(transfer, active.request, route)
            # Let the task that asks and NATS's writer run: the request must leave before our engine plans a step.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self._submit(active, Phase.DECODE)
            record = await self._prefill.run(transfer, active.request)
            route.succeeded()
            active.wait("decode.first_token")
            # Branches copy pages, and masks take time: not on the event loop.
            light = active.request.sampling.n == 1 and active.mask is None
            outputs = await self._engine.between_steps(
                lambda engine: engine.deliver(active.engine_id, record.first_token, record.logprobs), light=light
            )
        except MeshError as exc:
            in_time = now_ms() < active.request.deadline_unix_ms  # else the request came with too little time left
            if in_time and (transfer.waits_for_prefill or isinstance(exc, PrefillLost | PeerBroken)):
                route.failed(exc)
            if isinstance(exc, PrefillLost):
                record_lost("prefill.request", active.span, prefill.instance_id, exc.message)
            self._settle_later(transfer)
            self._compute_here(active, exc, prefill.instance_id)
        except BaseException:  # cancelled, or our bug: the pages must come back in both cases
            self._settle_later(transfer, cancelled=isinstance(active.error, Cancelled))
            raise
        else:
            for output in outputs:  # before the next await: the next step's tokens may follow at once
                self._active.emit(output)
            num_bytes = self._prefill.num_bytes(transfer)
            self._metrics.transferred(prefill.instance_id, num_bytes, transfer.duration_s, exemplar_of(active.span))
            await self._prefill.settle(transfer)

    def _compute_here(self, active: ActiveRequest, cause: MeshError, peer: str) -> None:
        self._metrics.transfer_failed(peer, cause)
        if self._on_transfer_failure == "fail" and not active.request.num_generated:
            self._engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
            raise KvUnavailable(cause.message, cause=type(cause).__name__) from cause
        log.warning("computing the prompt here", extra={"cause": cause.message})
        active.span.add_event("recompute", {"cause": cause.message})
        active.why_local = cause.message
        self._local.labels(Reason.TRANSFER_FAILED).inc()
        active.enter(RequestState.WAITING)
        active.wait(SPAN_LOCAL_PREFILL)
        self._engine.between_steps(lambda engine: engine.recompute(active.engine_id), light=True)

    def _submit(self, active: ActiveRequest, phase: Phase) -> None:
        request = active.request
        active.wait(SPAN_LOCAL_PREFILL)
        prompt = EngineRequest(
            request_id=active.engine_id,
            token_ids=active.token_ids,
            sampling=request.sampling,
            phase=phase,
            cache_salt=request.cache_salt,
            num_generated=request.num_generated,
            mask=active.mask,
            priority=request.priority,
            adapter=request.adapter,
            blocks=active.blocks,
        )

        # Branches may be cancelled while the mask is compiled.
        gone = [branch for branch in range(request.sampling.n) if branch not in active.streams]

        def submit(engine: Engine) -> None:
            engine.submit(prompt)
            for branch in gone:
                engine.cancel(active.engine_id, branch)

        def submitted(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                failed = error if isinstance(error, MeshError) else PeerLost(f"decode failed: {type(error).__name__}")
                self._stop(active, failed)

        # Checking and hashing a long prompt takes milliseconds, which the event loop should not lose.
        light = phase is Phase.DECODE and len(active.token_ids) <= LIGHT_TOKENS
        self._engine.between_steps(submit, light=light).add_done_callback(submitted)

    def _stop_branch(self, active: ActiveRequest, branch: int) -> None:
        if len(active.streams) == 1:
            self._stop(active, Cancelled("the client has gone"))
            return
        self._engine.between_steps(lambda engine: engine.cancel(active.engine_id, branch), light=True)
        self._active.drop(active, branch)

    def _stop(self, active: ActiveRequest, error: MeshError) -> None:
        self._engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
        self._active.fail(active, error)
        if (task := self._tasks.get(active.engine_id)) is not None:
            task.cancel()

    def _settle_later(self, transfer: InboundTransfer, *, cancelled: bool = False) -> None:
        """Free the exposed pages as soon as prefill cannot write into them any more."""

        async def settle() -> None:
            await self._prefill.settle(transfer, cancelled=cancelled)
            self._engine.between_steps(lambda engine: engine.release(transfer.engine_id), light=True)

        task = self._keep(f"settle {transfer.engine_id}", settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _keep(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return task

    def _stepped(self, output: StepOutput) -> None:
        self._metrics.record(output.stats)
        self._rate.stepped(output.stats.prompt_tokens, output.stats.step_s)
        for reserved in output.reserved:
            self._prefill.reserved(reserved)
        for tokens in output.tokens:
            self._active.emit(tokens)
        for failed in output.failed:
            if (active := self._active.find(failed.request_id)) is not None:
                self._stop(active, failed.error)
