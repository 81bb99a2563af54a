"""Remote prefill: a prompt is sent to one prefill instance after another, until its KV has arrived."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from components.aio import BackgroundTasks
from components.errors import (
    Cancelled,
    MeshError,
    NobodyListens,
    PeerBroken,
    PrefillLost,
    PromptTooLong,
    TransferFailed,
)
from components.messaging.clocks import now_ms
from components.messaging.fleet import Fleet
from components.routing.router import Route, RouteChoice
from components.telemetry.spans import exemplar_of, record_lost, step
from components.telemetry.worker_metrics import WorkerMetrics
from engine.loop.engine_loop import EngineLoop
from services.decode.inbound import InboundTransfer
from services.decode.prefill_choice import LocalPrefill, PrefillChoice
from services.decode.prefill_client import PrefillClient
from services.decode.requests import SPAN_FIRST, ActiveRequest, ActiveRequests

log = logging.getLogger(__name__)

MAX_PREFILLS_TRIED: Final = 3  # for one prompt
REFUSAL_TIMEOUT_S: Final = 0.1  # after a failed transfer, for prefill's answer to the call
SETTLE_TIMEOUT_S: Final = 1.0  # when this process stops, for prefill to confirm that it no longer writes


class FailedPrefill(NamedTuple):
    cause: MeshError
    was_begun: bool  # prefill may have started the prompt; after a refusal, no KV was lost


class RemotePrefill:
    def __init__(
        self,
        engine: EngineLoop,
        client: PrefillClient,
        prefills: Fleet,
        choice: PrefillChoice,
        active: ActiveRequests,
        *,
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._client = client
        self._prefills = prefills
        self._choice = choice
        self._active = active
        self._metrics = metrics
        self._settling = BackgroundTasks()  # of requests that have ended, but whose pages are still pinned

    async def fetch(
        self, active: ActiveRequest, chosen: RouteChoice, submit: Callable[[], None]
    ) -> FailedPrefill | None:
        """`submit` passes the request to the engine. Return None once the engine has the KV."""
        asked: list[str] = []
        transfer: InboundTransfer | None = None
        outcome: RouteChoice | FailedPrefill | None = chosen
        while isinstance(outcome, RouteChoice):
            asked.append(outcome.instance_id)
            active.prefill = outcome.instance_id
            transfer = self._client.begin(active.engine_id, self._choice.record_of(outcome), refused=transfer)
            outcome = await self._fetch_by(active, transfer, outcome, asked, submit)
        return outcome

    async def settled(self) -> None:
        """Wait for pinned pages for SETTLE_TIMEOUT_S. A live prefill answers within it.

        A dead one never does, and its offer may last a minute. Giving up is safe: this process ends, so no request reuses
        the pages.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._settling.drain()
        self._settling.cancel()

    async def _fetch_by(
        self,
        active: ActiveRequest,
        transfer: InboundTransfer,
        chosen: RouteChoice,
        asked: Sequence[str],
        submit: Callable[[], None],
    ) -> RouteChoice | FailedPrefill | None:
        """Return the instance to try next if this one refused."""
        tokens, peer = len(active.token_ids), chosen.instance_id
        router = self._prefills.router
        route = router.send(chosen, tokens - chosen.cached_tokens, router.pages_for(peer, tokens))
        try:
            with self._prefills.alive.watching(peer):
                failure = await self._receive(active, transfer, route, submit if len(asked) == 1 else None)
            following = None if failure is None else await self._choose_another(active, transfer, failure, asked)
        except BaseException:  # cancelled, or our bug: the pages must come back in both cases
            self._settle_later(transfer, cancelled=isinstance(active.error, Cancelled))
            raise
        finally:
            route.ended()
        if failure is None or following is not None:  # a refusal is no failure if another instance accepts
            return following
        self._metrics.transfer_failed(peer, failure)
        self._settle_later(transfer)
        # prefill may accept the prompt and its engine still refuse it, for example because it has fewer pages
        return FailedPrefill(failure, not (transfer.another_may_accept or isinstance(failure, PromptTooLong)))

    async def _receive(
        self, active: ActiveRequest, transfer: InboundTransfer, route: Route, submit: Callable[[], None] | None
    ) -> MeshError | None:
        """Pass the prompt's KV to the engine. Return the error if this failed. `submit`: None if the engine has the request."""
        try:
            self._client.call_prefill(transfer, active.request, route)
            # Yield to the task that calls prefill, and to NATS's writer: the message must leave before our engine plans a step.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if submit is not None:
                submit()
            record = await self._client.receive_kv(transfer, active.request)
            route.succeeded()
            active.wait(SPAN_FIRST)
            first_token = record.first_token if active.early_token is None else active.early_token
            # Not on the event loop: branches copy pages, and masks take time.
            light = active.request.sampling.n == 1 and active.mask is None
            outputs = await self._engine.between_steps(
                lambda engine: engine.deliver(active.engine_id, first_token, record.logprobs), light=light
            )
        except MeshError as exc:
            in_time = now_ms() < active.request.deadline_unix_ms  # else the instance is not at fault
            if in_time and (transfer.waits_for_prefill or isinstance(exc, PrefillLost | PeerBroken)):
                route.failed(exc)
            # an instance may die between the prompt and the offer of pages, which then finds no listener
            if isinstance(exc, PrefillLost) or (isinstance(exc, NobodyListens) and transfer.is_accepted):
                record_lost("prefill.request", active.span, transfer.prefill.instance_id, exc.message)
            return exc
        active.prefill_hit = record.num_cached_tokens
        if active.early_token is None:
            for output in outputs:  # before any await, because the next step's tokens may arrive at once
                self._active.emit(output)
        num_bytes = self._client.num_bytes(transfer)
        self._metrics.transferred(active.prefill, num_bytes, transfer.duration_s, exemplar_of(active.span))
        await self._client.wait_until_pages_safe(transfer)
        return None

    async def _choose_another(
        self, active: ActiveRequest, transfer: InboundTransfer, failure: MeshError, asked: Sequence[str]
    ) -> RouteChoice | None:
        """Choose another instance after a refusal. None: there is no other one, or the instance did not refuse."""
        if transfer.prefill_call is not None and isinstance(failure, TransferFailed):
            # An instance that is leaving also refuses the offer. That report may arrive before the refusal of the prompt.
            await asyncio.wait([transfer.prefill_call], timeout=REFUSAL_TIMEOUT_S)
        if not transfer.another_may_accept or len(asked) == MAX_PREFILLS_TRIED:
            return None
        if not self._choice.has_another(active.request.adapter, but_not=asked):
            return None
        if not await self._client.confirm_not_writing(transfer):
            return None
        with step("decode.choose_prefill", active.span) as choosing:
            chosen = await self._choice.choose_for(active, choosing, but_not=asked)
        if isinstance(chosen, LocalPrefill):
            return None
        facts = {"from": asked[-1], "to": chosen.instance_id, "cause": failure.message}
        log.info("sending the prompt to another prefill instance", extra=facts)
        active.span.add_event("prefill_refused", facts)
        return chosen

    def _settle_later(self, transfer: InboundTransfer, *, cancelled: bool = False) -> None:
        """Free the exposed pages as soon as prefill can no longer write into them."""
        transfer.give_up()  # at once, so that a late `KvComing` cannot send a token that this instance computes again

        async def settle() -> None:
            await self._client.wait_until_pages_safe(transfer, cancelled=cancelled)
            self._engine.between_steps(lambda engine: engine.release(transfer.engine_id), light=True)

        self._settling.start(settle(), f"settle {transfer.engine_id}")
