"""Runs requests on decode: chooses where the prompt is computed, and generates."""

import asyncio
import logging
from functools import partial
from typing import Final

from prometheus_client import Counter

from components.aio import exception_of
from components.errors import Cancelled, KvUnavailable, MeshError, PeerLost
from components.messaging.fleet import Fleet
from components.routing.policy import PromptLoad, PromptRate
from components.routing.router import RouteChoice
from components.structured.mask_maker import MaskMaker
from components.telemetry.light_span import Step
from components.telemetry.on_demand import OnDemand
from components.telemetry.spans import CurrentSpan, step
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.prefill import KvComing
from components.wire.sampling import Constraint
from engine.loop.engine_loop import EngineLoop
from engine.loop.log_line import BatchLog
from engine.ports import Engine, Phase, StepOutput, TokenMask, TokenOutput
from services.decode.config import OnTransferFailure
from services.decode.inbound import InboundState
from services.decode.prefill_choice import LocalPrefill, LocalPrefillReason, PrefillChoice
from services.decode.prefill_client import PrefillClient
from services.decode.remote_prefill import FailedPrefill, RemotePrefill
from services.decode.requests import SPAN_FIRST, SPAN_LOCAL_PREFILL, ActiveRequest, ActiveRequests, RequestState
from services.worker_requests import engine_request

log = logging.getLogger(__name__)

PROMPT_LOGPROBS: Final = LocalPrefill(
    LocalPrefillReason.PROMPT_LOGPROBS, "the client requested the prompt's log-probabilities"
)
MAX_LIGHT_TOKENS: Final = 4096  # checking and hashing this many tokens takes less than a millisecond


class RequestRunner:
    """Runs accepted requests. Each has a task until its first token is sent; after that engine steps drive it."""

    def __init__(
        self,
        engine: EngineLoop,
        prefill: PrefillClient,
        prefills: Fleet,
        active: ActiveRequests,
        *,
        masks: MaskMaker,
        metrics: WorkerMetrics,
        model: str,
        max_local_prefill: int,
        local_prefill_on_queue: bool,
        on_transfer_failure: OnTransferFailure,
    ) -> None:
        self.engine = engine
        self.prefill = prefill
        self.prefills = prefills
        self.active = active
        self.choice = PrefillChoice(
            prefills,
            engine.engine,
            prefill,
            self.prompts,
            model=model,
            max_local_prefill=max_local_prefill,
            local_prefill_on_queue=local_prefill_on_queue,
        )
        self._metrics = metrics
        self._on_transfer_failure = on_transfer_failure
        self._masks = masks
        self._rate = PromptRate()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the engine id of the request
        self._remote = RemotePrefill(engine, prefill, prefills, self.choice, active, metrics=metrics)
        self._local = Counter(
            "kvmesh_prompts_computed_on_decode",
            "Prompts that decode computed itself, by reason.",
            ["reason"],
            registry=metrics.registry,
        )
        for reason in LocalPrefillReason:
            self._local.labels(reason)
        OnDemand(metrics.registry).gauge(
            "kvmesh_prefill_instances_incompatible",
            "Prefill instances that this process never uses: other KV layout, backend or adapter weights.",
            lambda: self.choice.num_incompatible,
        )
        engine.on_output(self._stepped)
        engine.report(BatchLog(engine.engine.kv_region.layout.page_size, more=self._transfers_to_log).stepped)

    def start(self, active: ActiveRequest) -> None:
        engine_id = active.engine_id
        task = self._tasks[engine_id] = asyncio.create_task(self._run(active), name=engine_id)
        task.add_done_callback(lambda _: self._tasks.pop(engine_id, None))

    def stop(self, active: ActiveRequest, error: MeshError) -> None:
        self.engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
        self.active.fail(active, error)
        if (task := self._tasks.get(active.engine_id)) is not None:
            task.cancel()

    def stop_branch(self, active: ActiveRequest, branch: int) -> None:
        cancelled = Cancelled("the client has gone")
        if len(active.streams) == 1:
            self.stop(active, cancelled)
            return
        self.engine.between_steps(lambda engine: engine.cancel(active.engine_id, branch), light=True)
        self.active.fail_branch(active, branch, cancelled)

    def kv_coming(self, coming: KvComing) -> None:
        """Send the first token before the prompt's KV arrives, unless the answer may end with it.

        Do nothing while other requests run. The second token would wait for the end of their step, so an early first token
        would only lengthen the gap after it.
        """
        active, first_token = self.active.find(coming.request_id), coming.first_token
        reserved = self.prefill.offered(coming.request_id, coming.room)
        if active is None or reserved is None or first_token is None or active.first_token_ns:
            return
        if self.engine.stats.num_running:
            return
        if self._on_transfer_failure == "fail" and not active.request.num_generated:
            return  # as long as no token was sent, an error can still set the HTTP status
        sampling = active.request.sampling
        is_simple = sampling.n == 1 and sampling.logprobs is None and active.mask is None
        if is_simple and self.engine.engine.continues(len(active.token_ids), sampling, first_token):
            active.early_token, active.prefill_hit = first_token, coming.num_cached_tokens
            active.wait(SPAN_FIRST)
            self.active.emit(TokenOutput(active.engine_id, [first_token], None, reserved.num_cached_tokens))

    def prompts(self) -> PromptLoad:
        queued = 0
        if self.active.tally[RequestState.WAITING]:  # rarely the case if there are prefill instances
            waiting = (a for a in self.active.all() if a.lifecycle.state is RequestState.WAITING)
            queued = sum(len(active.token_ids) - active.num_cached for active in waiting)
        return PromptLoad(queued, self._rate.tokens_per_s)

    async def drained(self) -> None:
        await self.active.drained()
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._remote.settled()

    async def _run(self, active: ActiveRequest) -> None:
        with CurrentSpan(active.span):
            try:
                if (constraint := active.request.sampling.constraint) is not None:
                    active.mask = await self._mask_of(constraint, active)
                chosen = await self._choose(active)
                if chosen is None:
                    active.enter(RequestState.WAITING)
                    self._submit(active, Phase.FULL)
                else:
                    submit = partial(self._submit, active, Phase.DECODE)
                    if (failed := await self._remote.fetch(active, chosen, submit)) is not None:
                        self._compute_here(active, failed)
            except MeshError as exc:
                self.active.fail(active, exc)
            except Exception as exc:
                log.exception("request failed")
                self.engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
                self.active.fail(active, PeerLost(f"decode failed: {type(exc).__name__}"))

    async def _mask_of(self, constraint: Constraint, active: ActiveRequest) -> TokenMask:
        """Compile the constraint. Call it before pages are reserved and prefill is called.

        A request that waits for its mask must hold no pages, neither on decode nor on prefill.
        Raises: Rejected.
        """
        with step("decode.compile", active.span):
            return await self._masks.mask_of(constraint, active.token_ids, active.request.num_generated)

    async def _choose(self, active: ActiveRequest) -> RouteChoice | None:
        """Return None if decode should compute the prompt itself."""
        with step("decode.lookup", active.span) as lookup:
            hit = self.engine.engine.peek_prefix(active.blocks)
            lookup.note({"kvmesh.cached_tokens": hit})
        active.num_cached = hit
        with step("decode.choose_prefill", active.span) as choosing:
            if active.request.sampling.prompt_logprobs is not None:
                self._locally(PROMPT_LOGPROBS, active, choosing)
                return None
            chosen = await self.choice.choose_for(active, choosing)
            if isinstance(chosen, LocalPrefill):
                self._locally(chosen, active, choosing)
                return None
            return chosen

    def _locally(self, choice: LocalPrefill, active: ActiveRequest, choosing: Step) -> None:
        active.why_local = choice.why
        choosing.note({"kvmesh.prefill.why_local": choice.why})
        self._local.labels(choice.reason).inc()

    def _transfers_to_log(self) -> dict[str, float]:
        total_pages = max(1, self.engine.stats.total_pages)
        return {
            "#transfer-req": self.prefill.tally[InboundState.TRANSFER],
            "pre-allocated usage": round(self.prefill.num_reserved_pages / total_pages, 2),
        }

    def _compute_here(self, active: ActiveRequest, failed: FailedPrefill) -> None:
        """Compute the prompt on this instance: for the client this only adds latency.

        Raises: KvUnavailable instead, if `on_transfer_failure` is "fail", the request has no token yet, and a prefill instance
        has begun the prompt.
        """
        cause = failed.cause
        if failed.was_begun and self._on_transfer_failure == "fail" and not active.request.num_generated:
            self.engine.between_steps(lambda engine: engine.cancel(active.engine_id), light=True)
            raise KvUnavailable(cause.message, cause=type(cause).__name__) from cause
        log.warning("computing the prompt here", extra={"cause": cause.message})
        active.span.add_event("recompute", {"cause": cause.message})
        active.why_local = cause.message
        self._local.labels(LocalPrefillReason.TRANSFER_FAILED).inc()
        if (early_token := active.early_token) is None:
            active.enter(RequestState.WAITING)
            active.wait(SPAN_LOCAL_PREFILL)
        self.engine.between_steps(lambda engine: engine.recompute(active.engine_id, early_token), light=True)

    def _submit(self, active: ActiveRequest, phase: Phase) -> None:
        request = active.request
        active.wait(SPAN_LOCAL_PREFILL)
        prompt = engine_request(
            request,
            active.engine_id,
            active.token_ids,
            active.blocks,
            phase=phase,
            mask=active.mask,
            prediction=active.prediction,
        )

        # Branches may be cancelled while the mask is compiled.
        gone = [branch for branch in range(request.sampling.n) if branch not in active.streams]

        def submit(engine: Engine) -> None:
            engine.submit(prompt)
            for branch in gone:
                engine.cancel(active.engine_id, branch)

        def submitted(done: asyncio.Future[None]) -> None:
            if (error := exception_of(done)) is not None:
                failed = error if isinstance(error, MeshError) else PeerLost(f"decode failed: {type(error).__name__}")
                self.stop(active, failed)

        # Checking and hashing a long prompt would block the event loop for milliseconds.
        light = phase is Phase.DECODE and len(active.token_ids) + len(active.prediction) <= MAX_LIGHT_TOKENS
        self.engine.between_steps(submit, light=light).add_done_callback(submitted)

    def _stepped(self, output: StepOutput) -> None:
        self._metrics.record(output.stats)
        self._rate.stepped(output.stats.prompt_tokens, output.stats.step_s)
        for reserved in output.reserved:
            self.prefill.reserved(reserved)
        for tokens in output.tokens:
            self.active.emit(tokens)
        for failed in output.failed:
            if (active := self.active.find(failed.request_id)) is not None:
                self.stop(active, failed.error)
