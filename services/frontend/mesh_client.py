"""The frontend's client of the mesh: sends requests, reads their streams, and moves a stream whose instance is lost."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Final

from msgspec import structs
from opentelemetry import trace

from components.aio import BackgroundTasks
from components.errors import DecodeLost, FramesLost, MeshError, NobodyListens
from components.messaging.bus import Bus
from components.messaging.clocks import now_ms, remaining_s
from components.messaging.fleet import Fleet
from components.messaging.inbox import InStream, StreamInbox
from components.routing.router import Route
from components.telemetry.light_span import Step
from components.telemetry.spans import CurrentSpan, record_lost, record_step
from components.wire.codec import Struct
from components.wire.generate import CancelStreams, GenerateAccepted, GenerateRequest, StreamItem
from components.wire.instances import InstanceRecord
from components.wire.sampling import branch_seed
from components.wire.step_stats import NO_DRAFTS
from components.wire.tokens import pack_tokens
from services.frontend.decode_choice import RETRYABLE_ELSEWHERE, Attempts, DecodeChoice, Moves, Waits
from services.frontend.embed_calls import EmbedCalls
from services.frontend.ports import FleetRoom, Prompt, ServedModel, Sink, Texts
from services.frontend.request_timeline import request_timeline

log = logging.getLogger(__name__)

DISPATCH_TIMEOUT_S: Final = 10.0
RECONNECT_GRACE_S: Final = 2.0  # after our own reconnect; by then other processes have reconnected, too
ASK_RETRY_PAUSE_S: Final = 0.1


class MeshClient:
    """`services.frontend.ports.Mesh` over NATS."""

    def __init__(
        self,
        bus: Bus,
        inbox: StreamInbox,
        decodes: Fleet,
        model: str,
        waits: Waits = Waits(),  # noqa: B008 - frozen
    ) -> None:
        self._bus = bus
        self._inbox = inbox
        self._decodes = decodes.alive
        self._model = model
        self._sending = BackgroundTasks()  # messages that are being sent
        self._known: dict[str, ServedModel] = {}  # models served now, and those that may be served again soon
        self.moves = Moves()
        self.choice = DecodeChoice(decodes, model, waits)
        self._embed_calls = EmbedCalls(bus, inbox, self.choice, model, self._send_later)
        self._decodes.on_lost(self._instance_lost)
        self._decodes.on_ended(lambda record: inbox.forget_instance(record.instance_id))
        inbox.on_unwanted(self._cancel_again)

    def models(self) -> list[ServedModel]:
        """Return the model and its adapters. Each stays for a while after its last instance was lost: requests wait for it."""
        usable, now = self.choice.usable(), dict[str, ServedModel]()
        if usable:
            adapters = sorted({name for record in usable for name in record.adapters})
            self.choice.seen(*adapters)
            now[self._model] = _served(self._model, usable)
            now |= {a: _served(a, [r for r in usable if a in r.adapters], self._model) for a in adapters}
        soon = {name: model for name, model in self._known.items() if name not in now and self._may_come_back(model)}
        if usable:  # otherwise the last known models stay listed
            self._known = now | soon
        return [*now.values(), *soon.values()]

    def _may_come_back(self, model: ServedModel) -> bool:
        return self.choice.may_come_back(model.name if model.parent else "")

    def listed_models(self) -> list[ServedModel]:
        return self.models() or list(self._known.values())

    def room(self) -> FleetRoom:
        held = capacity = waiting = 0
        for record in self._decodes.usable(self._model):
            if record.kv is None:
                continue
            capacity += record.kv.num_pages * record.kv.layout.page_size
            beat = self._decodes.last_heartbeat(record.instance_id)
            if beat is not None:
                held += beat.held_pages * record.kv.layout.page_size
                waiting += max(beat.num_waiting, beat.num_requests - beat.num_running - beat.num_reserved)
        return FleetRoom(held, capacity or None, waiting)

    async def embed(self, texts: Texts) -> list[bytes]:
        return await self._embed_calls.embed(texts)

    async def generate(self, prompt: Prompt, sink: Sink) -> "list[Branch]":
        """Start the branches of `prompt` on one instance, which computes the prompt once.

        Each branch moves independently. Draws depend only on its (seed, position), so a move changes no random number.
        """
        attempts = Attempts()
        branches = [Branch(self, _of_branch(prompt, i), index=i, sink=sink) for i in range(prompt.sampling.n)]
        await self.dispatch(prompt, branches, attempts)
        for branch in branches:
            branch.start(deepcopy(attempts))
        return branches

    async def dispatch(self, prompt: Prompt, branches: "Sequence[Branch]", attempts: Attempts) -> None:
        """Attach `branches` to an instance that accepts the request."""
        while True:
            record, route = await self.choice.choose(prompt, attempts)
            for branch in branches:
                branch.attach(record, route, self._inbox.open(record.instance_id, record.epoch))
            accepted = False
            try:
                with request_timeline().dispatching() as span:
                    for branch in branches:
                        branch.dispatched = span
                    number = await self._send(prompt, record, branches[0].stream)
                route.accepted(number)
                accepted = True
                request_timeline().sent_to(record.instance_id)
            except RETRYABLE_ELSEWHERE as exc:
                self.moves.count_request(exc)
                branches[0].note_lost(exc)
                self.choice.note_move(prompt, route, exc, attempts)
            else:
                return
            finally:
                if not accepted:
                    for branch in branches:
                        branch.detach()

    def close(self, record: InstanceRecord, stream: InStream, *, is_over: bool) -> None:
        """Stop reading, and cancel the work if it has not ended."""
        self._inbox.close(stream)
        if not is_over:
            self._cancel(record, stream.stream_id)

    def _cancel(self, record: InstanceRecord, stream_id: int) -> None:
        cancelling = CancelStreams(reply_to=self._inbox.subject, stream_ids=[stream_id])
        self._send_later(f"{record.subject}.cancel", cancelling)

    def _cancel_again(self, instance_id: str, stream_id: int) -> None:
        record = self._decodes.find(instance_id)
        if record is not None:
            log.info("stream cancelled again", extra={"decode": instance_id, "stream_id": stream_id})
            self._cancel(record, stream_id)

    async def _send(self, prompt: Prompt, record: InstanceRecord, stream: InStream) -> int:
        """Send the request. Returns: the instance's number of accepted requests, for the load book."""
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
            num_generated=prompt.num_generated,
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
            adapter=self.choice.adapter(prompt),
            session=prompt.session,
            wants_origin=True,
            prediction=pack_tokens(prompt.prediction),
        )
        while True:
            await self._until_connected(prompt, stream)
            timeout_s = min(DISPATCH_TIMEOUT_S, remaining_s(prompt.deadline_unix_ms))
            call = self._bus.call(f"{record.subject}.generate", request, GenerateAccepted, timeout_s=timeout_s)
            try:
                return (await stream.failure.unless(call)).number
            except NobodyListens:
                if self._bus.since_reconnect_s() > RECONNECT_GRACE_S:
                    raise
                await asyncio.sleep(ASK_RETRY_PAUSE_S)  # NATS has restarted; the instance may not have reconnected yet

    async def _until_connected(self, prompt: Prompt, stream: InStream) -> None:
        """Wait until NATS is connected, because its client's buffer has room for only some hundred prompts.

        Raises: DeadlineExceeded, at the prompt's deadline; an error of the stream.
        """
        while not self._bus.is_connected:
            remaining_s(prompt.deadline_unix_ms)
            await stream.failure.unless(asyncio.sleep(ASK_RETRY_PAUSE_S))

    def _send_later(self, subject: str, message: Struct) -> None:
        """Send in the background, for callers that are being cancelled and cannot wait."""

        async def send() -> None:
            with contextlib.suppress(MeshError):  # a lost instance needs no message
                await self._bus.publish(subject, message)

        self._sending.start(send())

    def _instance_lost(self, record: InstanceRecord, why: str) -> None:
        self._inbox.fail_instance(record.instance_id, DecodeLost(f"decode {record.instance_id}: {why}"))


class Branch:
    """One branch of a prompt. Reads its stream, and moves to another instance if that fails."""

    __slots__ = (
        "_attempts",
        "_client",
        "_context",
        "_counts",
        "_earlier_counts",
        "_generated",
        "_has_begun",
        "_index",
        "_is_attached",
        "_is_over",
        "_moving",
        "_prompt",
        "_record",
        "_route",
        "_sink",
        "_span",
        "_timeline",
        "dispatched",
        "stream",
    )

    _attempts: Attempts
    _record: InstanceRecord
    _route: Route
    stream: InStream
    dispatched: trace.Span | Step  # span of the call that the instance accepted

    def __init__(self, client: MeshClient, prompt: Prompt, *, index: int, sink: Sink) -> None:
        self._client = client
        self._prompt = prompt
        self._index = index
        self._sink = sink
        self._span = trace.get_current_span()  # items arrive outside the request's task
        self._context, self._timeline = contextvars.copy_context(), request_timeline()
        self._generated: list[int] = []
        self._counts = self._earlier_counts = NO_DRAFTS  # drafts of this instance, and of earlier ones
        self._moving: asyncio.Task[None] | None = None
        self._is_attached = False
        self._has_begun = False  # the instance has sent tokens
        self._is_over = False  # the instance has sent the last token

    def attach(self, record: InstanceRecord, route: Route, stream: InStream) -> None:
        self._record, self._route, self.stream = record, route, stream
        self._is_attached, self._has_begun, self._is_over = True, False, False
        self._earlier_counts, self._counts = self._earlier_counts.plus(self._counts), NO_DRAFTS

    def detach(self) -> None:
        """Close the stream from the instance. Idempotent."""
        if self._is_attached:
            self._is_attached = False
            self._route.ended()
            self._client.close(self._record, self.stream, is_over=self._is_over)

    def start(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self.stream.start(self)

    def note_lost(self, why: MeshError) -> None:
        if isinstance(why, DecodeLost) and not isinstance(why, FramesLost):  # else the instance records its own spans
            record_lost("decode.request", self.dispatched, self._record.instance_id, why.message)

    def add_tokens(self, item: StreamItem) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._route.succeeded()
            if item.origin is not None:
                self._timeline.prompt_computed(item.origin)
            if item.sent_unix_ns and not self._generated:
                record_step("frontend.receive", item.sent_unix_ns, of=self._span)
        if item.draft_counts is not None:
            self._counts = item.draft_counts
            item = item._replace(draft_counts=self._earlier_counts.plus(self._counts))
        self._is_over = item.finish is not None
        self._generated += item.token_ids
        try:
            wants_more = self._sink.add_tokens(self._index, item)
        except MeshError as exc:
            # The reader failed, for example because the client is slow: a move would only repeat the work.
            self.close()
            self._sink.fail(exc)
            return
        if not wants_more or self._is_over:
            self.close()

    def fail(self, error: MeshError) -> None:
        if isinstance(error, RETRYABLE_ELSEWHERE):
            self._moving = asyncio.create_task(self._move(error), context=self._context)
        else:
            self.close()
            self._sink.fail(error)

    def close(self) -> None:
        self.detach()
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()

    async def _move(self, why: MeshError) -> None:
        try:
            with CurrentSpan(self._span):
                self._client.moves.count_stream(why)
                self.note_lost(why)
                self._client.choice.note_move(self._prompt, self._route, why, self._attempts)
                self.detach()
                rest = _rest_of(self._prompt, self._generated)
                self._client.moves.computed_again(len(rest.token_ids))
                await self._client.dispatch(rest, [self], self._attempts)
        except Exception as exc:  # noqa: BLE001 - the request ends with it
            self.detach()
            self._sink.fail(exc)
            return
        self._moving = None
        self.start(self._attempts)


def _served(name: str, records: Sequence[InstanceRecord], parent: str | None = None) -> ServedModel:
    context = min(r.max_context or 0 for r in records)
    embedding = None if parent else records[0].embedding
    return ServedModel(name, context, min(r.started_unix_ms for r in records) // 1000, parent, embedding)


def _of_branch(prompt: Prompt, branch: int) -> Prompt:
    sampling = prompt.sampling
    seed = branch_seed(sampling.seed, branch)
    prompt_logprobs = None if branch else sampling.prompt_logprobs
    return replace(prompt, sampling=structs.replace(sampling, n=1, seed=seed, prompt_logprobs=prompt_logprobs))


def _rest_of(prompt: Prompt, generated: list[int]) -> Prompt:
    if not generated:
        return prompt
    left = prompt.sampling.max_tokens - len(generated)
    sampling = structs.replace(prompt.sampling, max_tokens=left, prompt_logprobs=None)
    tokens = [*prompt.token_ids, *generated]
    return replace(prompt, token_ids=tokens, sampling=sampling, num_generated=len(generated))
