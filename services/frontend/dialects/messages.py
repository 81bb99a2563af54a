"""`/v1/messages`: a chat in the form of Anthropic's API."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from starlette.types import Scope

from components.anthropic.events import MessageEvents, body_of, content_of, status_of
from components.anthropic.messages import (
    PARAMS,
    AppliedEdits,
    CountRequest,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    StopReason,
)
from components.openai.chat import ChatRequest
from components.openai.errors import ApiError, in_other_words
from components.openai.fields import parse_body
from components.openai.parts import Parts, filled
from components.output.blocks import Block, Blocks
from services.frontend.choice import TextDelta
from services.frontend.dialects.dialect import ConversationDialect, EventStream
from services.frontend.generation import Generation
from services.frontend.incoming import Body
from services.frontend.reply import Headers

COUNT_ROUTE: Final = "/v1/messages/count_tokens"


class MessagesDialect(ConversationDialect):
    route = "/v1/messages"
    id_prefix = "msg_"
    prompt_param = "messages"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._params = PARAMS
        self.edits: AppliedEdits | None = None  # None: the request does not ask for edits

    async def read(self, body: Body, scope: Scope) -> ChatRequest:
        return await body.made_into(lambda data: self.take(parse_body(MessagesRequest, data)))

    def take(self, request: CountRequest) -> ChatRequest:
        """Turn the request into a chat. Raises: Rejected."""
        self._params = request.params
        self.edits = None if request.context_management is None else AppliedEdits()
        request.check()
        self.chat = request.chat()
        return self.chat

    def events(self, generation: Generation) -> EventStream:
        return MessageStream(self, generation)

    async def answer(self, pieces: Sequence[Sequence[TextDelta]], generation: Generation) -> Parts:
        [mine] = pieces
        blocks = await generation.text.run(len(mine), partial(blocks_of, mine))
        reason, sequence = why_it_stopped(generation)
        changes = {
            "content": [content_of(block) for block in blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
        }
        return filled(self.begun(generation).model_copy(update=changes))

    def begun(self, generation: Generation) -> MessageObject:
        """Return the message before its first block."""
        usage = MessageUsage.of(generation.usage())
        return MessageObject(id=self.response_id, model=self.chat.model, usage=usage, context_management=self.edits)

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        return status_of(error), body_of(in_other_words(error, self._params), self.request_id)

    def headers(self, shown_id: str) -> Headers:
        # Anthropic's clients expect the id in another header
        return [*super().headers(shown_id), (b"request-id", b"req_" + self.request_id.encode())]


class MessageStream:
    def __init__(self, dialect: MessagesDialect, generation: Generation) -> None:
        self._dialect = dialect
        self._generation = generation
        self._events = MessageEvents()
        self._begun = False

    def piece(self, piece: TextDelta) -> bytes:
        data = self._events.piece(piece.reasoning, piece.text, piece.calls)
        if not self._begun:
            self._begun = True
            data = self._events.begin(self._dialect.begun(self._generation)) + data
        return data

    async def end(self) -> bytes:
        reason, sequence = why_it_stopped(self._generation)
        usage = MessageUsage.of(self._generation.usage())
        return self._events.end(reason, sequence, usage, self._dialect.edits)

    def fail(self, error: ApiError) -> bytes:
        _, body = self._dialect.refusal(error)
        return b"event: error\ndata: %b\n\n" % body


def blocks_of(pieces: Sequence[TextDelta]) -> list[Block]:
    blocks = Blocks()
    for piece in pieces:
        blocks.add(piece.reasoning, piece.text, piece.calls)
    return blocks.all


def why_it_stopped(generation: Generation) -> tuple[StopReason, str | None]:
    choice = generation.choices[0]
    if choice.finish == "length":
        return "max_tokens", None
    if choice.finish == "tool_calls":
        return "tool_use", None
    return ("end_turn", None) if choice.stop_string is None else ("stop_sequence", choice.stop_string)
