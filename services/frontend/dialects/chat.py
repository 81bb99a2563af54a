"""`/v1/chat/completions`, and the events of chats and completions."""

import json
from collections.abc import Sequence
from functools import partial
from typing import cast

from starlette.types import Scope

from components.openai.chat import CallMade, ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from components.openai.errors import ApiError
from components.openai.events import DONE, NOTHING, Events, More, member
from components.openai.fields import FinishReason, GenerationFields, parse_body
from components.openai.logprobs import ChatLogprobs
from components.openai.parts import Parts, filled
from components.output.calls import whole_calls
from services.frontend.choice import TextDelta
from services.frontend.dialects.dialect import (
    ConversationDialect,
    EventStream,
    Logprobs,
    logprob_lists,
    prompt_extras,
    whole_choices,
)
from services.frontend.generation import Generation
from services.frontend.incoming import Body


class ChunkStream:
    """The server-sent events of a chat or a completion."""

    __slots__ = ("_events", "_generation", "_has_usage", "_logprobs", "_opened")

    def __init__(
        self,
        events: Events,
        logprobs: Logprobs,
        generation: Generation,
        *,
        has_usage: bool,
    ) -> None:
        self._events = events
        self._logprobs = logprobs
        self._generation = generation
        self._has_usage = has_usage
        self._opened: set[int] = set()

    def piece(self, piece: TextDelta) -> bytes:
        index = piece.choice
        data = self._text(piece) if piece.shows else b""
        if index not in self._opened:
            self._opened.add(index)
            data = self._events.open(index) + data
        return data if piece.finish is None else data + self._events.finish(index, piece.finish)

    async def end(self) -> bytes:
        if self._has_usage:
            return self._events.usage(self._generation.usage()) + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def _text(self, piece: TextDelta, more: More = NOTHING) -> bytes:
        index, text = piece.choice, piece.text
        logprobs = None if piece.tokens is None else self._logprobs.of(piece.tokens)
        if piece.reasoning or piece.calls:
            return self._events.parts(index, text, piece.reasoning, piece.calls, logprobs=logprobs, more=more)
        return self._events.text(index, text, logprobs, more)


class DetailedStream(ChunkStream):
    """A stream with vLLM's extras in each chunk: token ids, the usage so far."""

    __slots__ = ("_has_ids", "_has_usage_so_far")

    def __init__(
        self,
        events: Events,
        logprobs: Logprobs,
        generation: Generation,
        request: GenerationFields,
    ) -> None:
        super().__init__(events, logprobs, generation, has_usage=request.include_usage)
        self._has_ids = bool(request.return_token_ids)
        self._has_usage_so_far = request.continuous_usage

    def piece(self, piece: TextDelta) -> bytes:
        index, data = piece.choice, b""
        usage = member("usage", self._generation.usage().model_dump_json()) if self._has_usage_so_far else b""
        first = index not in self._opened
        if first:
            self._opened.add(index)
            data = self._events.open(index, More(usage=usage))
        if piece.shows or piece.token_ids:
            # a chat has one prompt, and its ids are sent once
            once = self._has_ids and first and self._events.opening is not None and index == 0
            prompt_ids = self._prompt_ids(index) if once else b""
            data += self._text(piece, More(self._ids(piece, first=first), prompt_ids, usage))
        return data if piece.finish is None else data + self._events.finish(index, piece.finish, More(usage=usage))

    def _ids(self, piece: TextDelta, *, first: bool) -> bytes:
        """New token ids of a choice, in a completion's first chunk after those of its prompt."""
        if not self._has_ids:
            return b""
        own = member("token_ids", json.dumps(list(piece.token_ids)))
        return self._prompt_ids(piece.choice) + own if first and self._events.opening is None else own

    def _prompt_ids(self, index: int) -> bytes:
        return member("prompt_token_ids", json.dumps(self._generation.choices[index].prompt.token_ids))


def chunks(
    request: GenerationFields,
    events: Events,
    logprobs: Logprobs,
    generation: Generation,
) -> ChunkStream:
    if request.return_token_ids or request.continuous_usage:
        return DetailedStream(events, logprobs, generation, request)
    return ChunkStream(events, logprobs, generation, has_usage=request.include_usage)


class ChatDialect(ConversationDialect):
    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"

    async def read(self, body: Body, scope: Scope) -> ChatRequest:
        self.chat = await body.made_into(partial(parse_body, ChatRequest))
        return self.chat

    def events(self, generation: Generation) -> EventStream:
        request = self.chat
        events = Events.chat(
            self.response_id,
            self.created,
            request.model,
            usage_follows=request.announces_usage,
            empty=self.plan.output is None,
        )
        return chunks(request, events, ChatLogprobs, generation)

    async def answer(self, pieces: Sequence[Sequence[TextDelta]], generation: Generation) -> Parts:
        token_ids, lists = prompt_extras(self.chat, generation, 0)
        completion = ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.chat.model,
            choices=[],
            usage=generation.usage(),
            prompt_token_ids=token_ids,
            prompt_logprobs=[] if lists else None,
        )
        made = (self._choice(i, choice) for i, choice in enumerate(whole_choices(pieces, self.chat)))
        return filled(completion, choices=made, **lists)

    def _choice(self, index: int, choice: TextDelta) -> Parts:
        made = ChatChoice(
            index=index,
            message=message_of(choice),
            logprobs=None if choice.tokens is None else ChatLogprobs.of(()),
            finish_reason=cast("FinishReason", choice.finish),
            token_ids=list(choice.token_ids) if self.chat.return_token_ids else None,
        )
        return filled(made, **logprob_lists(ChatLogprobs, choice))


def message_of(choice: TextDelta) -> ChatMessage:
    """The message of a choice. Its content is null if there are only reasoning or calls."""
    return ChatMessage(
        content=choice.text or (None if choice.reasoning or choice.calls else ""),
        reasoning_content=choice.reasoning or None,
        reasoning=choice.reasoning or None,
        tool_calls=[CallMade.of(call) for call in whole_calls(choice.calls)] or None,
    )
