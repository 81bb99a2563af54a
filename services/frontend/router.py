"""The frontend's side of the mesh: send a request, read its streams, and go on elsewhere when an instance dies."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from msgspec import structs
from opentelemetry.trace import SpanKind

from components.errors import DecodeLost, MeshError, NobodyListens
from components.messaging.bus import Bus
from components.messaging.deadline import now_ms, remaining_s
from components.messaging.fleet import Fleet
from components.messaging.inbox import InStream, StreamInbox
from components.routing.router import Route
from components.telemetry.spans import record_span, tracer
from components.wire.codec import Struct
from components.wire.generate import CancelStreams, GenerateAccepted, GenerateRequest, StreamItem
from components.wire.instances import InstanceRecord
from components.wire.tokens import pack_tokens
from engine.sampling.branches import branch_seed
from services.frontend.decode_choice import MOVING, NO_WORKER_WAIT_S, Attempts, DecodeChoice
from services.frontend.embed_calls import EmbedCalls
from services.frontend.ports import FleetRoom, Offer, Prompt, ServedModel, TokenDelta

DISPATCH_TIMEOUT_S: Final = 10.0
RECONNECT_S: Final = 2.0  # after our own reconnect others have reconnected, too
ASK_AGAIN_S: Final = 0.1


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

    def __init__(
        self,
        bus: Bus,
        inbox: StreamInbox,
        decodes: Fleet,
        model: str,
        *,
        no_worker_wait_s: float = NO_WORKER_WAIT_S,
    ) -> None:
        self._bus = bus
        self._inbox = inbox
        self._decodes = decodes.alive
        self._model = model
        self._cancels: set[asyncio.Task[None]] = set()
        self._served: list[ServedModel] = []  # by the instances that were there last
        self.choice = DecodeChoice(decodes, model, no_worker_wait_s)
        self.embed = EmbedCalls(bus, inbox, self.choice, model, self._tell_later).embed
        self._decodes.on_lost(self._instance_lost)

    def models(self) -> list[ServedModel]:
        """The one model this frontend can tokenise for, when a decode instance serves it, then its adapters.

        For a while after the last instance was lost they are still here: requests wait for it to come back.
        """
        usable = self.choice.usable()
        if usable:
            adapters = sorted({name for record in usable for name in record.adapters})
            mine = _served(self._model, usable)
            of_adapters = (_served(a, [r for r in usable if a in r.adapters], self._model) for a in adapters)
            self._served = [mine, *of_adapters]
        elif not self.choice.may_come_back():
            self._served = []
        return self._served

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
    async def generate(
        self, prompt: Prompt, offer: Offer | None = None
    ) -> AsyncIterator[list[AsyncGenerator[TokenDelta, None]]]:
        """The tokens of each branch of `prompt`. One whose instance is lost goes on elsewhere, from the tokens it has.

        The branches begin together, on an instance that computes the prompt once for them. From then on each goes its own
        way, and one that moves does so alone, as a request with the seed of its branch: draws depend on (seed, position)
        alone, so the tokens that follow are those the lost instance would have made.
        """
        attempts = Attempts()
        streams = await self._dispatch(prompt, attempts)
        branches = [
            self._follow(_of_branch(prompt, i), stream, deepcopy(attempts), offer) for i, stream in enumerate(streams)
        ]
        try:
            yield branches
        finally:
            for branch, stream in zip(branches, streams, strict=True):
                await branch.aclose()
                self._close(stream)  # it may not have begun to follow

    async def _follow(
        self, prompt: Prompt, stream: Stream, attempts: Attempts, offer: Offer | None
    ) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of one branch, whose request is on its way already."""
        generated: list[int] = []
        while True:
            try:
                while not stream.over:
                    delta = _delta(await stream.inner.next(), first=not generated)
                    if not stream.spoke:
                        stream.spoke = True
                        stream.route.succeeded()
                        if offer is not None:
                            stream.inner.listener = partial(_offered, offer, generated)
                    stream.over = delta.finish is not None
                    generated += delta.token_ids
                    yield delta
            except MOVING as exc:
                self.choice.note_move(prompt, stream.route, exc, attempts)
            else:
                return
            finally:
                self._close(stream)
            (stream,) = await self._dispatch(_rest_of(prompt, generated), attempts)

    async def _dispatch(self, prompt: Prompt, attempts: Attempts) -> list[Stream]:
        """A stream for each branch, from an instance that has accepted the request; `attempts` counts those that did not."""
        while True:
            record, route = await self.choice.choose(prompt, attempts)
            streams = [
                Stream(record, self._inbox.open(record.instance_id, record.epoch), route)
                for _ in range(prompt.sampling.n)
            ]
            accepted = False
            try:
                route.accepted(await self._send(prompt, record, streams[0].inner))
                accepted = True
            except MOVING as exc:
                self.choice.note_move(prompt, route, exc, attempts)
            else:
                return streams
            finally:
                if not accepted:
                    for stream in streams:
                        self._close(stream)

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
            sender=self._inbox.subject,
            sent_unix_ms=now_ms(),
            sampling=prompt.sampling,
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
            adapter=self.choice.adapter(prompt),
            session=prompt.session,
        )
        timeout_s = min(DISPATCH_TIMEOUT_S, remaining_s(prompt.deadline_unix_ms))
        with tracer.start_as_current_span("frontend.dispatch", kind=SpanKind.CLIENT):
            while True:
                call = self._bus.call(f"{record.subject}.generate", request, GenerateAccepted, timeout_s=timeout_s)
                try:
                    return (await stream.failure.unless(call)).number
                except NobodyListens:
                    if self._bus.steady_s() > RECONNECT_S:
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)  # NATS has restarted, and the instance may not be back yet

    def _cancel_later(self, stream: Stream) -> None:
        """Tell decode that nobody reads."""
        cancelling = CancelStreams(reply_to=self._inbox.subject, stream_ids=[stream.inner.stream_id])
        self._tell_later(f"{stream.record.subject}.cancel", cancelling)

    def _tell_later(self, subject: str, message: Struct) -> None:
        """Whoever is being closed or cancelled cannot wait for a message to leave."""

        async def tell() -> None:
            with contextlib.suppress(MeshError):  # a lost instance needs no telling
                await self._bus.publish(subject, message)

        task = asyncio.create_task(tell())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def _instance_lost(self, record: InstanceRecord, why: str) -> None:
        self._inbox.fail_instance(record.instance_id, DecodeLost(f"decode {record.instance_id}: {why}"))
        if self._decodes.find(record.instance_id) is None:  # it has ended; one that is silent may be back
            self._inbox.forget_instance(record.instance_id)


def _served(name: str, records: Sequence[InstanceRecord], parent: str | None = None) -> ServedModel:
    """What all of `records` can do under that name."""
    context = min(r.max_context or 0 for r in records)
    embedding = None if parent else records[0].embedding
    return ServedModel(name, context, min(r.started_unix_ms for r in records) // 1000, parent, embedding)


def _of_branch(prompt: Prompt, branch: int) -> Prompt:
    """What one branch alone asks for."""
    sampling = prompt.sampling
    seed = branch_seed(sampling.seed, branch)
    prompt_logprobs = None if branch else sampling.prompt_logprobs
    return replace(prompt, sampling=structs.replace(sampling, n=1, seed=seed, prompt_logprobs=prompt_logprobs))


def _rest_of(prompt: Prompt, generated: list[int]) -> Prompt:
    """What a branch with these tokens still asks for."""
    if not generated:
        return prompt
    sampling = structs.replace(
        prompt.sampling,
        max_tokens=prompt.sampling.max_tokens - len(generated),
        num_generated=len(generated),
        prompt_logprobs=None,
    )
    return replace(prompt, token_ids=[*prompt.token_ids, *generated], sampling=sampling)


def _offered(offer: Offer, generated: list[int], items: list[StreamItem]) -> bool:
    """Whether `offer` takes these items; then their tokens are among the `generated`."""
    if items[-1].finish is not None or items[-1].error is not None:
        return False
    delta = _delta(items, first=False)
    if not offer(delta):
        return False
    generated += delta.token_ids
    return True


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
