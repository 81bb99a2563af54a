"""The mesh's side of embeddings: sends texts to decode instances and receives vectors."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Final

from components.errors import MalformedMessage
from components.messaging.bus import Bus
from components.messaging.clocks import now_ms, remaining_s
from components.messaging.inbox import InStream, StreamInbox
from components.wire.codec import Struct
from components.wire.embed import MAX_TEXTS, CancelEmbed, EmbedRequest, Vectors
from components.wire.instances import InstanceRecord
from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from services.frontend.decode_choice import RETRYABLE_ELSEWHERE, Attempts, DecodeChoice
from services.frontend.ports import Prompt, Texts
from services.frontend.request_timeline import request_timeline

# Tokens of a call, unless it is a single longer text. Large enough to batch, small enough to spread over instances.
MAX_CALL_TOKENS: Final = 8192


class EmbedCalls:
    def __init__(
        self,
        bus: Bus,
        inbox: StreamInbox,
        choice: DecodeChoice,
        model: str,
        send_later: Callable[[str, Struct], None],
    ) -> None:
        """`send_later`: publishes a message without waiting."""
        self._bus = bus
        self._inbox = inbox
        self._choice = choice
        self._model = model
        self._send_later = send_later

    async def embed(self, texts: Texts) -> list[bytes]:
        """Return a vector for each text. Texts are divided into calls; a call whose instance is lost is retried elsewhere."""
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
        # all texts as one prompt, to choose an instance
        together = [token for tokens in texts.token_ids for token in tokens]
        nothing = SamplingParams(max_tokens=1)
        prompt = Prompt(texts.request_id, texts.model, together, nothing, texts.cache_salt, texts.deadline_unix_ms)
        attempts, numbers = Attempts(), count()
        while True:
            record, route = await self._choice.choose(prompt, attempts, max(map(len, texts.token_ids)))
            route.accepted(0)  # covered by the next heartbeat: its answer only arrives at its end
            stream = self._inbox.open(record.instance_id, record.epoch)  # only for its failure
            try:
                with request_timeline().dispatching():
                    # a new id for each attempt: an instance may still run the previous one
                    again = replace(texts, request_id=f"{texts.request_id}-{next(numbers)}")
                    vectors = await self._call_embed(again, record, stream)
                route.succeeded()
            except RETRYABLE_ELSEWHERE as exc:
                self._choice.note_move(prompt, route, exc, attempts)
            else:
                return vectors
            finally:
                route.ended()
                self._inbox.close(stream)

    async def _call_embed(self, texts: Texts, record: InstanceRecord, stream: InStream) -> list[bytes]:
        request = EmbedRequest(
            request_id=texts.request_id,
            epoch=record.epoch,
            model=self._model,
            texts=[pack_tokens(tokens) for tokens in texts.token_ids],
            deadline_unix_ms=texts.deadline_unix_ms,
            sender=self._inbox.subject,
            sent_unix_ms=now_ms(),
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
                self._send_later(f"{record.subject}.cancel_embed", CancelEmbed(request_id=texts.request_id))
        if len(vectors) != len(texts.token_ids):
            raise MalformedMessage(f"{len(vectors)} vectors of {len(texts.token_ids)} texts")
        return vectors


def _shares(texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the range of texts of each call, [first, last), bounded by MAX_TEXTS and MAX_CALL_TOKENS."""
    first = tokens = 0
    for i, text in enumerate(texts):
        if i > first and (i - first == MAX_TEXTS or tokens + len(text) > MAX_CALL_TOKENS):
            yield first, i
            first, tokens = i, 0
        tokens += len(text)
    yield first, len(texts)
