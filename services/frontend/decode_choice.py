"""Chooses a decode instance for a request, and limits how often the request may move to another one."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from prometheus_client import CollectorRegistry

from components.errors import (
    BackendUnavailable,
    Cancelled,
    DeadlineExceeded,
    FramesLost,
    MalformedMessage,
    MeshError,
    NobodyListens,
    NoDecodeInstance,
    Overloaded,
    PeerBroken,
    PeerLost,
    StaleInstance,
)
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms, remaining_s
from components.messaging.fleet import Fleet
from components.routing.policy import RouteRequest
from components.routing.router import Route, explained
from components.telemetry.light_span import Step
from components.telemetry.on_demand import OnDemand
from components.text.tokenizer import TextModel
from components.wire.heartbeat import Heartbeat
from components.wire.inspection import ExplainRoute, RouteExplained
from components.wire.instances import InstanceRecord
from components.wire.sampling import SamplingParams
from components.wire.tokens import PromptBlocks, pack_tokens, seed_hash
from services.frontend.ports import Prompt
from services.frontend.request_timeline import RequestTimeline, request_timeline

log = logging.getLogger(__name__)

MAX_MOVES: Final = 5
NO_RESPONDERS_S: Final = 10.0  # during this time, attempts that find no listener do not count as moves
MOVES_PER_BREAKING_ERROR: Final = 3  # so that one request breaks at most two instances
FIRST_BACK_OFF_S: Final = 0.05  # before an instance is tried again; doubles
MAX_BACK_OFF_S: Final = 1.0
# The instance or this request is broken, or the two do not understand each other.
INSTANCE_BROKEN: Final = (PeerBroken, MalformedMessage)
# After these errors a request tries another instance. Cancelled: NATS had no listener for our token frames for a while,
# so decode treated this frontend as gone.
RETRYABLE_ELSEWHERE: Final = (PeerLost, *INSTANCE_BROKEN, Overloaded, BackendUnavailable, DeadlineExceeded, Cancelled)
NATS_FAULTS: Final = (FramesLost, BackendUnavailable, Cancelled)  # caused by NATS: the same instance may be tried again


@dataclass(frozen=True, slots=True)
class Waits:
    """How long requests wait for a decode instance that they can use, in seconds."""

    for_any_s: float = 5.0  # new requests, since the last instance was lost
    for_another_s: float = 30.0  # requests whose instance was lost: it may restart


@dataclass(slots=True)
class Attempts:
    failed: list[str] = field(default_factory=list)  # ids of instances, latest last
    moves: int = 0
    no_responders_s: float | None = None  # monotonic time since when the chosen instances have had no listener


class DecodeChoice:
    def __init__(self, decodes: Fleet, model: str, waits: Waits) -> None:
        self._decodes = decodes.alive
        self._waits = waits
        self._seen_s: dict[str, float] = {}  # monotonic, last time an instance was usable, by adapter or ""
        self._measured: Sequence[InstanceRecord] = ()  # usable instances for which `_smallest` was computed
        self._smallest: float = math.inf  # tokens of context
        self._decodes.on_lost(lambda record, _reason: self.seen("", *record.adapters))
        self._decodes.on_heartbeat(self._on_heartbeat)  # one that drains is not lost
        self._router = decodes.router
        self._policy = decodes.policy.text
        self._rng = decodes.rng
        self._model = model

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        record = self._decodes.find(beat.instance_id)
        if record is not None and record.model == self._model and self._decodes.is_usable(beat.instance_id):
            self.seen("", *record.adapters)

    def usable(self, adapter: str = "") -> Sequence[InstanceRecord]:
        usable = self._decodes.usable(self._model, adapter)
        if usable:
            self.seen(adapter)
        return usable

    def seen(self, *adapters: str) -> None:
        """Record that an instance with these adapters is usable now."""
        self._seen_s.update(dict.fromkeys(adapters, time.monotonic()))

    def may_come_back(self, adapter: str) -> bool:
        return time.monotonic() < self._seen_s.get(adapter, -math.inf) + self._waits.for_any_s

    async def choose(
        self, prompt: Prompt, attempts: Attempts, context: int | None = None
    ) -> tuple[InstanceRecord, Route]:
        """Choose an instance that has not failed this request; if all have, one of them after a pause.

        `context`: tokens that it must hold at once; None: the prompt and its answer.

        Raises: NoDecodeInstance, if none comes back in time.
        """
        began, left_s = time.monotonic(), remaining_s(prompt.deadline_unix_ms)
        adapter = self.adapter(prompt)
        tokens = len(prompt.token_ids) + prompt.sampling.max_tokens if context is None else context
        timeline = request_timeline()
        with timeline.step("frontend.route") as step:
            while True:
                usable = self._large_enough(self.usable(adapter), tokens)
                fresh = [r for r in usable if r.instance_id not in attempts.failed] if attempts.failed else usable
                if usable and not fresh:
                    await asyncio.sleep(self._back_off_s(len(attempts.failed) - len(usable)))
                    usable = self._large_enough(self.usable(adapter), tokens)
                    fresh = [r for r in usable if r.instance_id not in attempts.failed] or usable
                found = self._route(prompt, fresh, timeline, step)
                if found is not None:
                    return found
                waited_s = time.monotonic() - began
                if attempts.moves:
                    worth_it = waited_s < self._waits.for_another_s
                elif self._decodes.usable(self._model, adapter):  # there are instances, but with too small a context
                    worth_it = waited_s < self._waits.for_any_s
                else:
                    worth_it = self.may_come_back(adapter)
                if not worth_it or waited_s >= left_s:
                    raise NoDecodeInstance(
                        f"no decode instance serves {prompt.model!r} with {tokens} tokens of context at the moment",
                        retry_after_s=2.0,
                    )
                await asyncio.sleep(0.1)

    def note_move(self, prompt: Prompt, route: Route, why: MeshError, attempts: Attempts) -> None:
        """Count a move, and report the failure to the router.

        Raises: `why`, if the request has moved too often; DeadlineExceeded.
        """
        attempts.moves += self._cost(why, attempts)
        request_timeline().moved(why.message)
        if not isinstance(why, NATS_FAULTS):
            if now_ms() < prompt.deadline_unix_ms:  # else the request ran out of its own time
                route.failed(why)
            attempts.failed.append(route.instance_id)
        if attempts.moves > MAX_MOVES:
            raise why
        remaining_s(prompt.deadline_unix_ms)
        facts = {"from": route.instance_id, "cause": why.message}
        if isinstance(why, Overloaded):  # the instance is full, or has just begun to drain: no work is lost
            log.info("request refused, trying another instance", extra=facts)
        else:
            log.warning("stream moves", extra=facts)
        trace.get_current_span().add_event("moved", facts)

    def _cost(self, why: MeshError, attempts: Attempts) -> int:
        if not isinstance(why, NobodyListens | StaleInstance):
            attempts.no_responders_s = None
            return MOVES_PER_BREAKING_ERROR if isinstance(why, INSTANCE_BROKEN) else 1
        # No instance received the request, or it has been replaced since. All may have just died: their silence is
        # detected within two seconds, and then the request waits for a new one.
        now_s = time.monotonic()
        attempts.no_responders_s = attempts.no_responders_s or now_s
        return 0 if now_s - attempts.no_responders_s < NO_RESPONDERS_S else 1

    def _large_enough(self, usable: Sequence[InstanceRecord], tokens: int) -> Sequence[InstanceRecord]:
        """Return `usable` itself if all are large enough: the router recognises an unchanged list."""
        if usable is not self._measured:
            self._measured = usable
            self._smallest = min((record.max_context or math.inf for record in usable), default=math.inf)
        if tokens <= self._smallest:
            return usable
        return [record for record in usable if tokens <= (record.max_context or math.inf)]

    def adapter(self, prompt: Prompt) -> str:
        """Any name other than the model's own is an adapter's, as in vLLM."""
        return "" if prompt.model == self._model else prompt.model

    def explain(self, prompt: Prompt) -> RouteExplained:
        usable = self._decodes.usable(self._model, self.adapter(prompt))
        blocks = self._blocks(prompt, usable)
        ask = RouteRequest(len(prompt.token_ids), session=prompt.session, prefix=blocks.prefix())
        chosen = (
            self._router.explain(ask, blocks, usable) or f"no decode instance serves {prompt.model!r} at the moment"
        )
        return explained(self._policy, pack_tokens(prompt.token_ids), chosen)

    def _back_off_s(self, tries: int) -> float:
        """Return the pause before the next attempt. `tries`: attempts since all instances were tried once."""
        return self._rng.uniform(0.5, 1.0) * min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(tries, 10))

    def _route(
        self, prompt: Prompt, usable: Sequence[InstanceRecord], timeline: RequestTimeline, step: Step
    ) -> tuple[InstanceRecord, Route] | None:
        """Choose one of `usable`, and count the request there in the load book."""
        blocks = self._blocks(prompt, usable)
        num_tokens = len(prompt.token_ids)
        ask = RouteRequest(
            num_tokens, session=prompt.session, prefix=blocks.prefix(), explain=timeline.is_kept and len(usable) > 1
        )
        chosen = self._router.choose(ask, blocks, usable)
        record = None if chosen is None else self._decodes.find(chosen.instance_id)
        if chosen is None or record is None:
            return None
        if timeline.is_kept:
            step.note({"kvmesh.decode.instance": chosen.instance_id, **chosen.facts()})
        pages = self._router.pages_for(chosen.instance_id, num_tokens - chosen.cached_tokens)
        # without the prompt's tokens, because decode chooses where the prompt is computed
        route = self._router.send(chosen, 0, pages, prompt.sampling.n)
        return record, route

    def _blocks(self, prompt: Prompt, usable: Sequence[InstanceRecord]) -> PromptBlocks:
        """Hashed as these instances hash them, with their model and the weights of the adapter."""
        kv = next((r for r in usable if r.kv is not None), None)
        adapter = self.adapter(prompt)
        identity = kv.adapters.get(adapter, "") if kv is not None else ""
        model = kv.kv.layout.model if kv is not None and kv.kv is not None else ""
        return PromptBlocks(pack_tokens(prompt.token_ids), seed_hash(model, identity, prompt.cache_salt))


def explain_endpoint(choice: DecodeChoice, text: TextModel, model: str) -> Endpoint:
    """Return the endpoint for `inspect route`: where a text would be routed now. It sends nothing to decode."""

    async def explain_route(request: ExplainRoute) -> RouteExplained:
        messages = [{"role": "user", "content": request.text}]
        token_ids = await (text.encode_chat(messages) if request.chat else text.encode_text(request.text))
        prompt = Prompt(
            request_id="",
            model=request.adapter or model,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=request.cache_salt,
            deadline_unix_ms=now_ms(),
            session=request.session,
        )
        return choice.explain(prompt)

    return Endpoint("explain_route", ExplainRoute, explain_route)


class Moves:
    """How often streams and requests moved to another decode instance, and what that cost."""

    def __init__(self) -> None:
        self._streams: Counter[str] = Counter()  # by class of the error
        self._requests: Counter[str] = Counter()
        self._tokens = 0

    def count_stream(self, why: MeshError) -> None:
        """Count a stream that had been accepted."""
        self._streams[type(why).__name__] += 1

    def count_request(self, why: MeshError) -> None:
        """Count a request that an instance did not accept."""
        self._requests[type(why).__name__] += 1

    def computed_again(self, tokens: int) -> None:
        """Count a moved stream's prompt and the tokens that it had."""
        self._tokens += tokens

    def show(self, metrics: CollectorRegistry) -> None:
        shown = OnDemand(metrics)
        shown.counter(
            "kvmesh_streams_moved",
            "Streams that moved to another decode instance, by the error of the instance that they left.",
            lambda: _by_reason(self._streams),
            ["reason"],
        )
        shown.counter(
            "kvmesh_requests_retried",
            "Requests sent to another decode instance because one did not accept them, by its error.",
            lambda: _by_reason(self._requests),
            ["reason"],
        )
        shown.counter(
            "kvmesh_tokens_computed_again",
            "Tokens of moved streams that another instance had to compute again, unless it had them cached.",
            lambda: self._tokens,
        )


def _by_reason(counts: Counter[str]) -> dict[tuple[str, ...], float]:
    """Counts by label, with a zero for the usual reason, so that a rate can be taken from the start."""
    return {(reason,): float(count) for reason, count in {"DecodeLost": 0, **counts}.items()}
