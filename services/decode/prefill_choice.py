"""Where a prompt is computed: here, or by which prefill instance."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from opentelemetry import trace

from components.errors import MeshError, UnknownModel
from components.kv_transfer.layout import check_compatible, check_same_adapter
from components.messaging.fleet import Fleet
from components.messaging.service import Endpoint
from components.routing.block_hash import PromptBlocks
from components.routing.candidates import Inquiry
from components.routing.choice import Ask
from components.routing.local_prefill import PromptLoad, sooner_here
from components.routing.router import Chosen, explained
from components.wire.instances import InstanceRecord
from components.wire.routes import ExplainRoute, RouteExplained
from engine.ports import Engine
from services.decode.remote_prefill import RemotePrefill

log = logging.getLogger(__name__)

QUEUES: Final = "every prefill queue lasts longer than computing it here"


class Wanted(NamedTuple):
    """What the choice depends on, of one request."""

    blocks: PromptBlocks  # by the names that the caches of instances which fit give them
    adapter: str
    session: str


class PrefillChoice:
    """Knows which prefill instances fit this decode instance, and asks the router for one of them."""

    def __init__(
        self,
        fleet: Fleet,
        engine: Engine,
        remote: RemotePrefill,
        own_prompts: Callable[[], PromptLoad],
        *,
        model: str,
        max_local_prefill: int,
        local_prefill_on_queue: bool,
    ) -> None:
        """`own_prompts`: what is to be computed here already."""
        self._fleet = fleet
        self._alive = fleet.alive
        self._engine = engine
        self._remote = remote
        self._own_prompts = own_prompts
        self._model = model
        self._max_local_prefill = max_local_prefill
        self._overflow = local_prefill_on_queue
        self._fitting: dict[str, _Fitting] = {}  # by adapter
        self._refused: dict[str, set[str]] = {}  # why instances do not fit us, each reason said once
        fleet.alive.on_lost(self._lost)

    def endpoint(self) -> Endpoint:
        """The call for an explanation."""
        return Endpoint("explain_route", ExplainRoute, self.explain_route)

    async def choose(self, wanted: Wanted, remaining: int, *, explain: bool = False, dry: bool = False) -> Chosen | str:
        """A prefill instance for a prompt of which `remaining` tokens are not cached here, or why it is computed here."""
        if remaining <= self._max_local_prefill:
            return f"only {remaining} tokens remain"
        if not self._remote.has_room:
            return "there are as many transfers as aux slots"
        usable = self._usable(wanted.adapter)
        blocks = wanted.blocks
        ask = Ask(blocks.num_tokens, session=wanted.session, prefix=blocks.prefix(), explain=explain, dry=dry)
        inquiries = self._fleet.inquiries
        if inquiries is not None and inquiries.are_needed:
            return self._chosen_by(await inquiries.about(ask, blocks, usable), remaining, usable, wanted.adapter)
        if self._is_sooner_here(remaining, [record.instance_id for record in usable]):
            return QUEUES
        return self._fleet.router.choose(ask, blocks, usable) or self._why_nobody(usable, wanted.adapter)

    def _chosen_by(
        self, inquiry: Inquiry, remaining: int, usable: Sequence[InstanceRecord], adapter: str
    ) -> Chosen | str:
        """One of the instances that have answered."""
        trace.get_current_span().set_attribute("kvmesh.route.asked", inquiry.num_asked)
        if self._is_sooner_here(remaining, inquiry.answered):
            return QUEUES
        chosen = inquiry.choose()
        if chosen is None and inquiry.num_asked:
            return f"none of the {inquiry.num_asked} prefill instances asked takes work"
        return chosen or self._why_nobody(usable, adapter)

    def _is_sooner_here(self, remaining: int, instance_ids: Sequence[str]) -> bool:
        if not self._overflow:
            return False
        return sooner_here(remaining, self._own_prompts(), (self._alive.prompts(i) for i in instance_ids))

    def _why_nobody(self, usable: Sequence[InstanceRecord], adapter: str) -> str:
        which = f"prefill instance{f' with adapter {adapter}' if adapter else ''}"
        if usable:
            return f"every {which} has just failed, and is tried again later"
        if self._alive.usable(self._model, adapter):
            return f"every {which} stands still, or does not fit"
        return f"no {which} is alive"

    def record_of(self, chosen: Chosen) -> InstanceRecord:
        """The instance that was chosen a moment ago."""
        record = self._alive.find(chosen.instance_id)
        assert record is not None, "those that are usable are known"
        return record

    async def explain_route(self, request: ExplainRoute) -> RouteExplained:
        """Where a prompt would be computed now, and why. Raises: UnknownModel."""
        if request.adapter and request.adapter not in self._engine.adapters:
            raise UnknownModel(f"this instance has no adapter {request.adapter!r} of {self._model!r}")
        blocks = self._engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter)
        wanted = Wanted(blocks, request.adapter, request.session)
        chosen = await self.choose(wanted, blocks.num_tokens - self._engine.peek_prefix(blocks), explain=True, dry=True)
        return explained(self._fleet.policy, request.token_ids, chosen)

    def _usable(self, adapter: str) -> Sequence[InstanceRecord]:
        """Prefill instances whose KV is what we would compute with `adapter`."""
        alive = self._alive.usable(self._model, adapter, or_nobody=True)
        known = self._fitting.get(adapter)
        if known is None or known.of is not alive:
            known = _Fitting(alive, [record for record in alive if self._fits(record, adapter)])
            self._fitting[adapter] = known
        return known.records

    def _fits(self, record: InstanceRecord, adapter: str) -> bool:
        if record.kv is None:
            return False
        try:
            check_compatible(self._engine.kv_region.layout, record.kv.layout)
            self._remote.check(record.kv)
            if adapter:
                check_same_adapter(adapter, self._engine.adapters[adapter], record.adapters[adapter])
        except MeshError as exc:
            told = self._refused.setdefault(record.instance_id, set())
            if exc.message not in told:
                told.add(exc.message)
                log.warning("prefill instance not used", extra={"prefill": record.instance_id, "cause": exc.message})
            return False
        return True

    def _lost(self, record: InstanceRecord, _why: str) -> None:
        self._refused.pop(record.instance_id, None)


class _Fitting(NamedTuple):
    """Of a list of those that are alive, which stays the same while nothing changes, those that fit."""

    of: Sequence[InstanceRecord]
    records: Sequence[InstanceRecord]
