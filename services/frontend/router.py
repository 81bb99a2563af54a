"""The frontend's side of the mesh: choose a decode instance, read its stream, and go on elsewhere when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    DecodeLost,
    MeshError,
    NoDecodeInstance,
    Overloaded,
    PeerLost,
)
from components.messaging.bus import Bus
from components.messaging.deadline import remaining_s
from components.messaging.heartbeats import Liveness
from components.messaging.streams import InStream, StreamInbox
from components.routing.policy import RoundRobin
from components.telemetry.spans import record_span, tracer
from components.wire.generate import CancelStreams, GenerateAccepted, GenerateRequest, StreamItem
from components.wire.instances import InstanceRecord
from components.wire.tokens import pack_tokens
from services.frontend.ports import Prompt, ServedModel, TokenDelta

log = logging.getLogger(__name__)

DISPATCH_TIMEOUT_S = 10.0
WAIT_FOR_DECODE_S = 30.0  # for a stream that has begun: a decode instance that died may be restarting
MOVES = 5


class MeshClient:
    """See `services.frontend.ports.Mesh`."""

    def __init__(self, bus: Bus, inbox: StreamInbox, decodes: Liveness, model: str) -> None:
        self._bus = bus
        self._inbox = inbox
        self._decodes = decodes
        self._model = model
        self._policy = RoundRobin()
        self._cancels: set[asyncio.Task[None]] = set()
        decodes.on_lost(self._instance_lost)

    def models(self) -> list[ServedModel]:
        """The one model this frontend can tokenise for, when a decode instance serves it, then its adapters."""
        usable = self._decodes.usable(self._model)
        if not usable:
            return []
        adapters = sorted({name for record in usable for name in record.adapters})
        mine = _served(self._model, usable)
        return [mine, *(_served(a, [r for r in usable if a in r.adapters], self._model) for a in adapters)]

    async def generate(self, prompt: Prompt) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of `prompt`. A stream whose instance is lost goes on elsewhere, from the tokens it has.

        Draws depend on (seed, position) alone, so the tokens that follow are those the lost instance would have made.
        """
        generated: list[int] = []
        tried: list[str] = []
        while True:
            record = await self._choose(prompt, tried, started=bool(generated))
            stream = self._inbox.open(record.instance_id, record.epoch)
            over = False
            try:
                await self._dispatch(prompt, generated, record, stream)
                while not over:
                    delta = self._delta(await stream.next(), first=not generated)
                    over = delta.finish is not None
                    generated += delta.token_ids
                    yield delta
            except (PeerLost, Overloaded, BackendUnavailable, DeadlineExceeded) as exc:
                tried.append(record.instance_id)
                if len(tried) > MOVES:
                    raise
                remaining_s(prompt.deadline_unix_ms)
                log.warning("stream moves", extra={"request": prompt.request_id, "cause": exc.message})
                trace.get_current_span().add_event("moved", {"from": record.instance_id, "cause": exc.message})
            else:
                return
            finally:
                self._inbox.close(stream)
                if not over:
                    self._cancel_later(record, stream)

    async def _choose(self, prompt: Prompt, tried: list[str], *, started: bool) -> InstanceRecord:
        """An instance not tried yet, else one tried before; a stream that has begun waits for one to come back.

        Raises: NoDecodeInstance.
        """
        until = time.monotonic() + (min(WAIT_FOR_DECODE_S, remaining_s(prompt.deadline_unix_ms)) if started else 0.0)
        with tracer.start_as_current_span("frontend.route") as span:
            while True:
                usable = self._decodes.usable(self._model, self._adapter(prompt))
                chosen = self._policy.choose([r for r in usable if r.instance_id not in tried] or usable)
                if chosen is not None:
                    span.set_attribute("kvmesh.decode.instance", chosen.instance_id)
                    span.set_attribute("kvmesh.decode.candidates", len(usable))
                    return chosen
                if time.monotonic() >= until:
                    raise NoDecodeInstance(
                        f"no decode instance serves {prompt.model!r} at the moment", retry_after_s=2.0
                    )
                await asyncio.sleep(0.1)

    async def _dispatch(self, prompt: Prompt, generated: list[int], record: InstanceRecord, stream: InStream) -> None:
        request = GenerateRequest(
            request_id=prompt.request_id,
            epoch=record.epoch,
            model=self._model,
            stream_id=stream.stream_id,
            reply_to=self._inbox.subject,
            token_ids=pack_tokens([*prompt.token_ids, *generated]),
            deadline_unix_ms=prompt.deadline_unix_ms,
            sampling=replace(
                prompt.sampling, max_tokens=prompt.sampling.max_tokens - len(generated), num_generated=len(generated)
            ),
            cache_salt=prompt.cache_salt,
            adapter=self._adapter(prompt),
        )
        timeout_s = min(DISPATCH_TIMEOUT_S, remaining_s(prompt.deadline_unix_ms))
        with tracer.start_as_current_span("frontend.dispatch", kind=SpanKind.CLIENT):
            call = self._bus.call(f"{record.subject}.generate", request, GenerateAccepted, timeout_s=timeout_s)
            await stream.failure.unless(call)

    def _adapter(self, prompt: Prompt) -> str:
        """Any name but the model's own is one of an adapter, as in vLLM."""
        return "" if prompt.model == self._model else prompt.model

    def _delta(self, items: list[StreamItem], *, first: bool) -> TokenDelta:
        if first and items[0].sent_unix_ns:
            record_span("frontend.receive", items[0].sent_unix_ns)
        token_ids = [token for item in items for token in item.token_ids]
        return TokenDelta(token_ids, items[-1].finish, items[0].num_cached_tokens)

    def _cancel_later(self, record: InstanceRecord, stream: InStream) -> None:
        """Tell decode that nobody reads; a reader that is being closed cannot wait for that itself."""

        async def cancel() -> None:
            with contextlib.suppress(MeshError):  # a lost instance needs no telling
                cancelling = CancelStreams(reply_to=self._inbox.subject, stream_ids=[stream.stream_id])
                await self._bus.publish(f"{record.subject}.cancel", cancelling)

        task = asyncio.create_task(cancel())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def _instance_lost(self, record: InstanceRecord, why: str) -> None:
        self._inbox.fail_instance(record.instance_id, DecodeLost(f"decode {record.instance_id}: {why}"))


def _served(name: str, records: Sequence[InstanceRecord], parent: str | None = None) -> ServedModel:
    """What all of `records` can do under that name."""
    context = min(r.max_context or 0 for r in records)
    return ServedModel(name, context, min(r.started_unix_ms for r in records) // 1000, parent)
