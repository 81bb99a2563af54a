"""The frontend's side of the mesh: choose a decode instance, read its stream, and go on elsewhere when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    DecodeLost,
    MalformedMessage,
    MeshError,
    NoDecodeInstance,
    Overloaded,
    PeerLost,
)
from components.messaging.bus import Bus
from components.messaging.deadline import remaining_s
from components.messaging.fleet import Fleet
from components.messaging.streams import InStream, StreamInbox
from components.routing.block_hash import PromptBlocks, seed_hash
from components.routing.choice import Ask
from components.routing.router import Route, explained
from components.telemetry.spans import record_span, tracer
from components.wire.embed import MAX_TEXTS, CancelEmbed, EmbedRequest, Vectors
from components.wire.generate import CancelStreams, GenerateAccepted, GenerateRequest, StreamItem
from components.wire.instances import InstanceRecord
from components.wire.routes import RouteExplained
from components.wire.sampling import Sampling
from components.wire.tokens import pack_tokens
from engine.sampling.branches import branch_seed
from services.frontend.ports import FleetRoom, Prompt, ServedModel, Texts, TokenDelta

log = logging.getLogger(__name__)

DISPATCH_TIMEOUT_S = 10.0
WAIT_FOR_DECODE_S = 30.0  # for a stream that has begun: a decode instance that died may be restarting
MOVES = 5
TOKENS_A_CALL = 8192  # of texts that go together, more only in one: large enough to batch, small enough to spread
FIRST_BACK_OFF_S = 0.05  # before an instance is asked again; doubles
MOST_BACK_OFF_S = 1.0
MOVING = (PeerLost, Overloaded, BackendUnavailable, DeadlineExceeded)  # with these a stream tries another instance


@dataclass(slots=True)
class Stream:
    """One branch's tokens, from one instance."""

    record: InstanceRecord
    inner: InStream
    route: Route
    over: bool = False  # read to its end, or cancelled
    spoke: bool = False  # it has brought tokens
    closed: bool = False


class MeshClient:
    """See `services.frontend.ports.Mesh`."""

    def __init__(self, bus: Bus, inbox: StreamInbox, decodes: Fleet, model: str) -> None:
        self._bus = bus
        self._inbox = inbox
        self._decodes = decodes.alive
        self._router = decodes.router
        self._policy = decodes.policy
        self._rng = decodes.rng
        self._model = model
        self._cancels: set[asyncio.Task[None]] = set()
        self._decodes.on_lost(self._instance_lost)

    def models(self) -> list[ServedModel]:
        """The one model this frontend can tokenise for, when a decode instance serves it, then its adapters."""
        usable = self._decodes.usable(self._model)
        if not usable:
            return []
        adapters = sorted({name for record in usable for name in record.adapters})
        mine = _served(self._model, usable)
        return [mine, *(_served(a, [r for r in usable if a in r.adapters], self._model) for a in adapters)]

    def room(self) -> FleetRoom:
        """By what instances registered with and by their last heartbeats; before its first one, an instance is empty."""
        held = capacity = waiting = 0
        for record in self._decodes.usable(self._model):
            if record.kv is None:
                continue
            capacity += record.kv.num_pages * record.kv.layout.page_size
            said = self._decodes.last_heartbeat(record.instance_id)
            if said is not None:
                held += said.held_pages * record.kv.layout.page_size
                waiting += max(said.num_waiting, said.num_requests - said.num_running - said.num_reserved)
        return FleetRoom(held, capacity or None, waiting)

    @asynccontextmanager
    async def generate(self, prompt: Prompt) -> AsyncIterator[list[AsyncGenerator[TokenDelta, None]]]:
        """The tokens of each branch of `prompt`. One whose instance is lost goes on elsewhere, from the tokens it has.

        The branches begin together, on an instance that computes the prompt once for them. From then on each goes its own
        way, and one that moves does so alone, as a request with the seed of its branch: draws depend on (seed, position)
        alone, so the tokens that follow are those the lost instance would have made.
        """
        tried: list[str] = []
        streams = await self._dispatch(prompt, tried)
        branches = [self._follow(_of_branch(prompt, i), stream, list(tried)) for i, stream in enumerate(streams)]
        try:
            yield branches
        finally:
            for branch, stream in zip(branches, streams, strict=True):
                await branch.aclose()
                self._close(stream)  # it may not have begun to follow

    async def embed(self, texts: Texts) -> list[bytes]:
        """The vector of each text. They go in calls of some texts each, maybe to several instances, and a call whose instance
        is lost goes to another one.
        """
        calls = [
            replace(texts, request_id=f"{texts.request_id}-{number}", token_ids=texts.token_ids[first:last])
            for number, (first, last) in enumerate(_shares(texts.token_ids))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._embed(call)) for call in calls]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [vector for task in tasks for vector in task.result()]

    async def _embed(self, texts: Texts) -> list[bytes]:
        """By one call. The prompt made of all its texts is for the choice of an instance alone."""
        together = [token for tokens in texts.token_ids for token in tokens]
        nothing = Sampling(max_tokens=1)
        prompt = Prompt(texts.request_id, texts.model, together, nothing, texts.cache_salt, texts.deadline_unix_ms)
        tried: list[str] = []
        while True:
            record, route = await self._choose(prompt, tried)
            stream = self._inbox.open(record.instance_id, record.epoch)  # for its failure: nothing comes on it
            try:
                vectors = await self._call_embed(
                    replace(texts, request_id=f"{texts.request_id}-{len(tried)}"), record, stream
                )
                route.succeeded()
            except MOVING as exc:
                self._note_move(prompt, route, exc, tried)
            else:
                return vectors
            finally:
                route.over()
                self._inbox.close(stream)

    async def _call_embed(self, texts: Texts, record: InstanceRecord, stream: InStream) -> list[bytes]:
        request = EmbedRequest(
            request_id=texts.request_id,
            epoch=record.epoch,
            model=self._model,
            texts=[pack_tokens(tokens) for tokens in texts.token_ids],
            deadline_unix_ms=texts.deadline_unix_ms,
            cache_salt=texts.cache_salt,
            priority=texts.priority,
        )
        timeout_s = remaining_s(texts.deadline_unix_ms)
        answered = False
        try:
            call = self._bus.call(f"{record.subject}.embed", request, Vectors, timeout_s=timeout_s)
            vectors = (await stream.failure.unless(call)).vectors
            answered = True
        finally:
            if not answered:
                self._tell_later(f"{record.subject}.cancel_embed", CancelEmbed(request_id=texts.request_id))
        if len(vectors) != len(texts.token_ids):
            raise MalformedMessage(f"{len(vectors)} vectors of {len(texts.token_ids)} texts")
        return vectors

    async def _follow(self, prompt: Prompt, stream: Stream, tried: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of one branch, whose request is on its way already."""
        generated: list[int] = []
        while True:
            try:
                while not stream.over:
                    delta = _delta(await stream.inner.next(), first=not generated)
                    if not stream.spoke:
                        stream.spoke = True
                        stream.route.succeeded()
                    stream.over = delta.finish is not None
                    generated += delta.token_ids
                    yield delta
            except MOVING as exc:
                self._note_move(prompt, stream.route, exc, tried)
            else:
                return
            finally:
                self._close(stream)
            (stream,) = await self._dispatch(_rest_of(prompt, generated), tried)

    async def _dispatch(self, prompt: Prompt, tried: list[str]) -> list[Stream]:
        """A stream for each branch, from an instance that has accepted the request; `tried` grows by those that did not."""
        while True:
            record, route = await self._choose(prompt, tried)
            streams = [
                Stream(record, self._inbox.open(record.instance_id, record.epoch), route)
                for _ in range(prompt.sampling.n)
            ]
            accepted = False
            try:
                route.accepted(await self._send(prompt, record, streams[0].inner))
                accepted = True
            except MOVING as exc:
                self._note_move(prompt, route, exc, tried)
            else:
                return streams
            finally:
                if not accepted:
                    for stream in streams:
                        self._close(stream)

    def _note_move(self, prompt: Prompt, route: Route, why: MeshError, tried: list[str]) -> None:
        """Raises: `why`, when the request has moved too often; DeadlineExceeded."""
        route.failed(why)
        tried.append(route.instance_id)
        if len(tried) > MOVES:
            raise why
        remaining_s(prompt.deadline_unix_ms)
        log.warning("stream moves", extra={"request": prompt.request_id, "cause": why.message})
        trace.get_current_span().add_event("moved", {"from": route.instance_id, "cause": why.message})

    def _close(self, stream: Stream) -> None:
        """Nobody reads it any more, whatever has become of it."""
        if stream.closed:
            return
        stream.closed = True
        stream.route.over()
        self._inbox.close(stream.inner)
        if not stream.over:
            stream.over = True
            self._cancel_later(stream)

    async def _choose(self, prompt: Prompt, tried: list[str]) -> tuple[InstanceRecord, Route]:
        """An instance not tried yet, else, after a while, one tried before; a stream that has begun waits for one to come back.

        Raises: NoDecodeInstance.
        """
        started = prompt.sampling.num_generated > 0
        until = time.monotonic() + (min(WAIT_FOR_DECODE_S, remaining_s(prompt.deadline_unix_ms)) if started else 0.0)
        with tracer.start_as_current_span("frontend.route") as span:
            while True:
                usable = self._decodes.usable(self._model, self._adapter(prompt))
                fresh = [r for r in usable if r.instance_id not in tried] if tried else usable
                if usable and not fresh:
                    await asyncio.sleep(self._back_off_s(len(tried) - len(usable)))
                    usable = self._decodes.usable(self._model, self._adapter(prompt))
                    fresh = [r for r in usable if r.instance_id not in tried] or usable
                found = self._route(prompt, fresh, span)
                if found is not None:
                    return found
                if time.monotonic() >= until:
                    raise NoDecodeInstance(
                        f"no decode instance serves {prompt.model!r} at the moment", retry_after_s=2.0
                    )
                await asyncio.sleep(0.1)

    def _back_off_s(self, tries: int) -> float:
        """Before somebody is asked again, not at the same moment as all others to whom the same happened.

        `tries`: beyond one of each.
        """
        return self._rng.uniform(0.5, 1.0) * min(MOST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(tries, 10))

    def explain(self, prompt: Prompt) -> RouteExplained:
        """Where `prompt` would go now, and why; nothing is sent."""
        usable = self._decodes.usable(self._model, self._adapter(prompt))
        blocks = self._blocks(prompt, usable)
        ask = Ask(len(prompt.token_ids), session=prompt.session, prefix=blocks.prefix())
        chosen = (
            self._router.explain(ask, blocks, usable) or f"no decode instance serves {prompt.model!r} at the moment"
        )
        return explained(self._policy, pack_tokens(prompt.token_ids), chosen)

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
        adapter = self._adapter(prompt)
        identity = kv.adapters.get(adapter, "") if kv is not None else ""
        model = kv.kv.layout.model if kv is not None and kv.kv is not None else ""
        return PromptBlocks(pack_tokens(prompt.token_ids), seed_hash(model, identity, prompt.cache_salt))

    async def _send(self, prompt: Prompt, record: InstanceRecord, stream: InStream) -> int:
        """Have `record` take the request, whose first stream this is. Returns: how many it has taken with it."""
        request = GenerateRequest(
            request_id=prompt.request_id,
            epoch=record.epoch,
            model=self._model,
            stream_id=stream.stream_id,
            reply_to=self._inbox.subject,
            token_ids=pack_tokens(prompt.token_ids),
            deadline_unix_ms=prompt.deadline_unix_ms,
            sampling=prompt.sampling,
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
            adapter=self._adapter(prompt),
            session=prompt.session,
        )
        timeout_s = min(DISPATCH_TIMEOUT_S, remaining_s(prompt.deadline_unix_ms))
        with tracer.start_as_current_span("frontend.dispatch", kind=SpanKind.CLIENT):
            call = self._bus.call(f"{record.subject}.generate", request, GenerateAccepted, timeout_s=timeout_s)
            return (await stream.failure.unless(call)).number

    def _adapter(self, prompt: Prompt) -> str:
        """Any name but the model's own is one of an adapter, as in vLLM."""
        return "" if prompt.model == self._model else prompt.model

    def _cancel_later(self, stream: Stream) -> None:
        """Tell decode that nobody reads."""
        cancelling = CancelStreams(reply_to=self._inbox.subject, stream_ids=[stream.inner.stream_id])
        self._tell_later(f"{stream.record.subject}.cancel", cancelling)

    def _tell_later(self, subject: str, message: object) -> None:
        """Whoever is being closed or cancelled cannot wait for a message to leave."""

        async def tell() -> None:
            with contextlib.suppress(MeshError):  # a lost instance needs no telling
                await self._bus.publish(subject, message)

        task = asyncio.create_task(tell())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def _instance_lost(self, record: InstanceRecord, why: str) -> None:
        self._inbox.fail_instance(record.instance_id, DecodeLost(f"decode {record.instance_id}: {why}"))


def _served(name: str, records: Sequence[InstanceRecord], parent: str | None = None) -> ServedModel:
    """What all of `records` can do under that name."""
    context = min(r.max_context or 0 for r in records)
    embedding = None if parent else records[0].embedding
    return ServedModel(name, context, min(r.started_unix_ms for r in records) // 1000, parent, embedding)


def _shares(texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """From which to which text each call goes: as many as it may have, and as make up some work."""
    first = tokens = 0
    for i, text in enumerate(texts):
        if i > first and (i - first == MAX_TEXTS or tokens + len(text) > TOKENS_A_CALL):
            yield first, i
            first, tokens = i, 0
        tokens += len(text)
    yield first, len(texts)


def _of_branch(prompt: Prompt, branch: int) -> Prompt:
    """What one branch alone asks for."""
    sampling = prompt.sampling
    seed = branch_seed(sampling.seed, branch)
    prompt_logprobs = None if branch else sampling.prompt_logprobs
    return replace(prompt, sampling=replace(sampling, n=1, seed=seed, prompt_logprobs=prompt_logprobs))


def _rest_of(prompt: Prompt, generated: list[int]) -> Prompt:
    """What a branch with these tokens still asks for."""
    if not generated:
        return prompt
    sampling = replace(
        prompt.sampling,
        max_tokens=prompt.sampling.max_tokens - len(generated),
        num_generated=len(generated),
        prompt_logprobs=None,
    )
    return replace(prompt, token_ids=[*prompt.token_ids, *generated], sampling=sampling)


def _delta(items: list[StreamItem], *, first: bool) -> TokenDelta:
    head, last = items[0], items[-1]
    if first and head.sent_unix_ns:
        record_span("frontend.receive", head.sent_unix_ns)
    if len(items) == 1:  # as good as always
        told = head.logprobs
        return TokenDelta(head.token_ids, head.finish, head.num_cached_tokens, told, head.prompt_logprobs)
    token_ids = [token for item in items for token in item.token_ids]
    told = None if head.logprobs is None else [entry for item in items for entry in item.logprobs or ()]
    return TokenDelta(token_ids, last.finish, head.num_cached_tokens, told, head.prompt_logprobs)
