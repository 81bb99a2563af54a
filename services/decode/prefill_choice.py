"""The choice of a prefill instance for a prompt, or of computing it here."""

import logging
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum, auto
from typing import Final, NamedTuple

from opentelemetry import trace

from components.errors import MeshError
from components.messaging.call_server import Endpoint
from components.messaging.fleet import Fleet
from components.routing.candidates import CandidateQuery
from components.routing.policy import PromptLoad, RouteRequest, is_sooner_locally
from components.routing.router import RouteChoice, explained
from components.telemetry.light_span import Step
from components.telemetry.spans import NO_STEP
from components.wire.inspection import ExplainRoute, RouteExplained
from components.wire.instances import InstanceRecord
from components.wire.layout import check_compatible, check_same_adapter
from components.wire.tokens import PromptBlocks
from engine.ports import Engine
from services.decode.prefill_client import PrefillClient
from services.decode.requests import ActiveRequest
from services.worker_requests import check_adapter

log = logging.getLogger(__name__)


class LocalPrefillReason(StrEnum):
    """Why decode computes a prompt itself."""

    FEW_TOKENS = auto()  # few uncached tokens
    PROMPT_LOGPROBS = auto()  # requested by the client, and not transferred with KV
    NO_AUX_SLOT = auto()  # all slots are in use
    QUEUES = auto()  # waiting in any prefill queue would take longer
    NO_PREFILL = auto()  # none is registered and alive
    UNUSABLE = auto()  # all live instances hang or are incompatible
    BREAKERS = auto()  # the circuit breakers of all usable instances are open
    UNANSWERED = auto()  # none of the queried instances accepts work
    TRANSFER_FAILED = auto()  # its KV did not arrive


class LocalPrefill(NamedTuple):
    reason: LocalPrefillReason
    why: str


LOCAL_IS_SOONER: Final = LocalPrefill(
    LocalPrefillReason.QUEUES, "every prefill queue takes longer than computing it here"
)
NO_FREE_AUX_SLOT: Final = LocalPrefill(LocalPrefillReason.NO_AUX_SLOT, "all aux slots are in use by other transfers")


class PrefillChoice:
    """Chooses a compatible prefill instance, or local prefill.

    Only `_is_compatible` checks compatibility; a backend checks it again when it connects.
    """

    def __init__(
        self,
        fleet: Fleet,
        engine: Engine,
        prefill: PrefillClient,
        own_prompts: Callable[[], PromptLoad],
        *,
        model: str,
        max_local_prefill: int,
        local_prefill_on_queue: bool,
    ) -> None:
        """`own_prompts` returns the load of the prompts that this decode instance computes itself."""
        self._fleet = fleet
        self._alive = fleet.alive
        self._engine = engine
        self._prefill = prefill
        self._own_prompts = own_prompts
        self._model = model
        self._max_local_prefill = max_local_prefill
        self._overflow = local_prefill_on_queue
        self._compatible: dict[str, _Compatible] = {}  # by adapter
        self._refused: dict[str, set[str]] = {}  # reasons already logged, by instance: each is logged once
        fleet.alive.on_lost(self._lost)

    def endpoint(self) -> Endpoint:
        return Endpoint("explain_route", ExplainRoute, self.explain_route)

    async def choose(
        self,
        blocks: PromptBlocks,
        remaining: int,
        *,
        adapter: str,
        session: str,
        but_not: Collection[str] = (),
        explain: bool = False,
        dry: bool = False,
    ) -> RouteChoice | LocalPrefill:
        """Choose an instance for a prompt with `remaining` tokens to compute.

        `but_not`: ids of instances that have refused it.
        """
        if remaining <= self._max_local_prefill:
            return LocalPrefill(LocalPrefillReason.FEW_TOKENS, f"only {remaining} tokens are not cached")
        if not self._prefill.has_free_aux_slot:
            return NO_FREE_AUX_SLOT
        usable = self._usable(adapter, but_not)
        explain = explain and (dry or len(usable) > 1)  # with a single candidate there is nothing to compare
        ask = RouteRequest(blocks.num_tokens, session=session, prefix=blocks.prefix(), explain=explain, dry=dry)
        candidate_queries = self._fleet.candidate_queries
        if candidate_queries is not None and candidate_queries.are_needed:
            query = await candidate_queries.query(ask, blocks, usable)
            if not self._prefill.has_free_aux_slot:  # other requests have taken the last slots in the meantime
                return NO_FREE_AUX_SLOT
            return self._chosen_by(query, remaining, usable, adapter)
        if self._is_sooner_here(remaining, [member.instance_id for member in self._fleet.router.candidates(usable)]):
            return LOCAL_IS_SOONER
        return self._fleet.router.choose(ask, blocks, usable) or self._why_none(usable, adapter)

    async def choose_for(
        self, active: ActiveRequest, choosing: Step, but_not: Collection[str] = ()
    ) -> RouteChoice | LocalPrefill:
        chosen = await self.choose(
            active.blocks,
            len(active.token_ids) - active.num_cached,
            adapter=active.request.adapter,
            session=active.request.session,
            but_not=but_not,
            explain=choosing is not NO_STEP,
        )
        if choosing is not NO_STEP and not isinstance(chosen, LocalPrefill):
            choosing.note({"kvmesh.prefill.instance": chosen.instance_id, **chosen.facts()})
        return chosen

    def _chosen_by(
        self, query: CandidateQuery, remaining: int, usable: Sequence[InstanceRecord], adapter: str
    ) -> RouteChoice | LocalPrefill:
        trace.get_current_span().set_attribute("kvmesh.route.asked", query.num_asked)
        if self._is_sooner_here(remaining, query.answered):
            return LOCAL_IS_SOONER
        chosen = query.choose()
        if chosen is None and query.num_asked:
            return LocalPrefill(
                LocalPrefillReason.UNANSWERED, f"none of {query.num_asked} prefill instances can take the prompt"
            )
        if chosen is None:
            return self._why_none(usable, adapter)
        if not self._is_compatible(self.record_of(chosen), adapter):
            restarted = f"prefill instance {chosen.instance_id} has restarted with other settings"
            return LocalPrefill(LocalPrefillReason.UNUSABLE, restarted)
        return chosen

    def _is_sooner_here(self, remaining: int, instance_ids: Sequence[str]) -> bool:
        if not self._overflow:
            return False
        return is_sooner_locally(remaining, self._own_prompts(), (self._alive.prompt_load(i) for i in instance_ids))

    def _why_none(self, usable: Sequence[InstanceRecord], adapter: str) -> LocalPrefill:
        which = f"prefill instance{f' with adapter {adapter}' if adapter else ''}"
        if usable:
            return LocalPrefill(LocalPrefillReason.BREAKERS, f"every {which} has failed recently, and is retried later")
        if self._alive.usable(self._model, adapter):
            return LocalPrefill(LocalPrefillReason.UNUSABLE, f"every {which} hangs, or is incompatible")
        return LocalPrefill(LocalPrefillReason.NO_PREFILL, f"no {which} is alive")

    @property
    def num_incompatible(self) -> int:
        """Prefill instances that are alive and never used, because of another layout, backend or adapter."""
        return len(self._refused)

    def record_of(self, chosen: RouteChoice) -> InstanceRecord:
        record = self._alive.find(chosen.instance_id)
        assert record is not None, "a usable instance has a record"
        return record

    async def explain_route(self, request: ExplainRoute) -> RouteExplained:
        """Return where a prompt would be computed now, and why. Raises: UnknownModel."""
        check_adapter(request.adapter, self._engine.adapters, self._model)
        blocks = self._engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter)
        remaining = blocks.num_tokens - self._engine.peek_prefix(blocks)
        chosen = await self.choose(
            blocks, remaining, adapter=request.adapter, session=request.session, explain=True, dry=True
        )
        shown = chosen.why if isinstance(chosen, LocalPrefill) else chosen
        return explained(self._fleet.policy.text, request.token_ids, shown)

    def has_another(self, adapter: str, *, but_not: Collection[str]) -> bool:
        return bool(self._usable(adapter, but_not))

    def _usable(self, adapter: str, but_not: Collection[str]) -> Sequence[InstanceRecord]:
        """Return the prefill instances that compute the same KV with `adapter` as this instance."""
        alive = self._alive.usable(self._model, adapter, or_none=True)
        known = self._compatible.get(adapter)
        if known is None or known.of is not alive:
            known = _Compatible(alive, [record for record in alive if self._is_compatible(record, adapter)])
            self._compatible[adapter] = known
        return [r for r in known.records if r.instance_id not in but_not] if but_not else known.records

    def _is_compatible(self, record: InstanceRecord, adapter: str) -> bool:
        if record.kv is None or (adapter and adapter not in record.adapters):
            return False
        try:
            check_compatible(self._engine.kv_region.layout, record.kv.layout)
            self._prefill.check(record.kv)
            if adapter:
                check_same_adapter(adapter, self._engine.adapters[adapter], record.adapters[adapter])
        except MeshError as exc:
            logged = self._refused.setdefault(record.instance_id, set())
            if exc.message not in logged:
                logged.add(exc.message)
                log.warning("prefill instance not used", extra={"prefill": record.instance_id, "cause": exc.message})
            return False
        return True

    def _lost(self, record: InstanceRecord, _why: str) -> None:
        self._refused.pop(record.instance_id, None)


class _Compatible(NamedTuple):
    """The compatible instances among those alive. `Liveness` returns the same list object while nothing changes."""

    of: Sequence[InstanceRecord]
    records: Sequence[InstanceRecord]
