"""Which decode instance a request goes to, how often it may go to another one, and why it went there."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry import trace

from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    MeshError,
    NoDecodeInstance,
    Overloaded,
    PeerBroken,
    PeerLost,
)
from components.messaging.deadline import remaining_s
from components.messaging.fleet import Fleet
from components.routing.block_hash import PromptBlocks, seed_hash
from components.routing.choice import Ask
from components.routing.router import Route, explained
from components.telemetry.spans import tracer
from components.wire.instances import InstanceRecord
from components.wire.routes import RouteExplained
from components.wire.tokens import pack_tokens
from services.frontend.ports import Prompt

log = logging.getLogger(__name__)

WAIT_FOR_DECODE_S: Final = 30.0  # of a request that was lost with its instance, which may be restarting
MOVES: Final = 5
BROKEN_MOVES: Final = 3  # one of `BREAKING` uses up so many: a request that breaks instances breaks two of them at most
FIRST_BACK_OFF_S: Final = 0.05  # before an instance is asked again; doubles
MOST_BACK_OFF_S: Final = 1.0
# The instance, or this request of ours, is broken, or they do not understand each other.
BREAKING: Final = (PeerBroken, MalformedMessage)
# With these a request tries another instance.
MOVING: Final = (PeerLost, *BREAKING, Overloaded, BackendUnavailable, DeadlineExceeded)


class DecodeChoice:
    """Asks the router for one of the decode instances that serve the model of a prompt."""

    def __init__(self, decodes: Fleet, model: str) -> None:
        self._decodes = decodes.alive
        self._router = decodes.router
        self._policy = decodes.policy
        self._rng = decodes.rng
        self._model = model

    async def choose(self, prompt: Prompt, tried: list[str]) -> tuple[InstanceRecord, Route]:
        """An instance not tried yet, else, after a while, one tried before; what one has lost waits for one to come back.

        Raises: NoDecodeInstance.
        """
        wait_s = min(WAIT_FOR_DECODE_S, remaining_s(prompt.deadline_unix_ms)) if tried else 0.0
        until = time.monotonic() + wait_s
        with tracer.start_as_current_span("frontend.route") as span:
            while True:
                usable = self._decodes.usable(self._model, self.adapter(prompt))
                fresh = [r for r in usable if r.instance_id not in tried] if tried else usable
                if usable and not fresh:
                    await asyncio.sleep(self._back_off_s(len(tried) - len(usable)))
                    usable = self._decodes.usable(self._model, self.adapter(prompt))
                    fresh = [r for r in usable if r.instance_id not in tried] or usable
                found = self._route(prompt, fresh, span)
                if found is not None:
                    return found
                if time.monotonic() >= until:
                    raise NoDecodeInstance(
                        f"no decode instance serves {prompt.model!r} at the moment", retry_after_s=2.0
                    )
                await asyncio.sleep(0.1)

    def note_move(self, prompt: Prompt, route: Route, why: MeshError, tried: list[str]) -> None:
        """Raises: `why`, when the request has moved too often; DeadlineExceeded."""
        route.failed(why)
        tried += [route.instance_id] * (BROKEN_MOVES if isinstance(why, BREAKING) else 1)
        if len(tried) > MOVES:
            raise why
        remaining_s(prompt.deadline_unix_ms)
        log.warning("stream moves", extra={"request": prompt.request_id, "cause": why.message})
        trace.get_current_span().add_event("moved", {"from": route.instance_id, "cause": why.message})

    def adapter(self, prompt: Prompt) -> str:
        """Any name but the model's own is one of an adapter, as in vLLM."""
        return "" if prompt.model == self._model else prompt.model

    def explain(self, prompt: Prompt) -> RouteExplained:
        """Where `prompt` would go now, and why; nothing is sent."""
        usable = self._decodes.usable(self._model, self.adapter(prompt))
        blocks = self._blocks(prompt, usable)
        ask = Ask(len(prompt.token_ids), session=prompt.session, prefix=blocks.prefix())
        chosen = (
            self._router.explain(ask, blocks, usable) or f"no decode instance serves {prompt.model!r} at the moment"
        )
        return explained(self._policy, pack_tokens(prompt.token_ids), chosen)

    def _back_off_s(self, tries: int) -> float:
        """Before somebody is asked again, not at the same moment as all others to whom the same happened.

        `tries`: beyond one of each.
        """
        return self._rng.uniform(0.5, 1.0) * min(MOST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(tries, 10))

    def _route(
        self, prompt: Prompt, usable: Sequence[InstanceRecord], span: trace.Span
    ) -> tuple[InstanceRecord, Route] | None:
        """One of `usable`, with the request on its way there as far as the load book is concerned."""
        blocks = self._blocks(prompt, usable)
        num_tokens = len(prompt.token_ids)
        ask = Ask(num_tokens, session=prompt.session, prefix=blocks.prefix(), explain=span.is_recording())
        chosen = self._router.choose(ask, blocks, usable)
        record = None if chosen is None else self._decodes.find(chosen.instance_id)
        if chosen is None or record is None:
            return None
        span.set_attribute("kvmesh.decode.instance", chosen.instance_id)
        span.set_attributes(chosen.facts())
        pages = self._router.pages_for(chosen.instance_id, num_tokens - chosen.cached_tokens)
        # where its prompt is computed is decode's choice, and what waits there its heartbeats tell
        route = self._router.send(chosen, 0, pages, prompt.sampling.n)
        return record, route

    def _blocks(self, prompt: Prompt, usable: Sequence[InstanceRecord]) -> PromptBlocks:
        """By the names that caches of these instances give them; one with other weights of an adapter has others."""
        kv = next((r for r in usable if r.kv is not None), None)
        adapter = self.adapter(prompt)
        identity = kv.adapters.get(adapter, "") if kv is not None else ""
        model = kv.kv.layout.model if kv is not None and kv.kv is not None else ""
        return PromptBlocks(pack_tokens(prompt.token_ids), seed_hash(model, identity, prompt.cache_salt))
