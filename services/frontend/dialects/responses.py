"""`/v1/responses`: a chat in items. A response may be stored when it has ended, and may run in the background."""

import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, Literal

from starlette.types import Scope

from components.errors import Cancelled, MeshError, Rejected, UnknownResponse
from components.openai.chat import ChatRequest
from components.openai.errors import ApiError, in_other_words
from components.openai.fields import parse_body
from components.openai.items import InputItem, ItemReference, OutputItem, Status
from components.openai.logprobs import ChatLogprobs, ShownToken, TokenLogprob
from components.openai.parts import Parts, filled
from components.openai.response_events import ResponseEvents, item_of, response_of
from components.openai.response_tools import Callee
from components.openai.responses import (
    PARAMS,
    IncompleteDetails,
    InputTokensRequest,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseStatus,
    ResponsesUsage,
)
from components.output.blocks import Block, Blocks
from components.text.tokenizer import TextModel
from components.wire.responses import StoredResponse
from services.frontend.answer_form import error_of
from services.frontend.choice import TextDelta
from services.frontend.dialects.dialect import ConversationDialect, EventStream
from services.frontend.gate import caller_of
from services.frontend.generation import Generation
from services.frontend.incoming import Body
from services.frontend.reply import Reply
from services.frontend.request_timeline import request_timeline
from services.frontend.stored import Remembered, StoredResponses, items_before, output_items

log = logging.getLogger(__name__)

NO_STORE: Final = "has a value that this server does not support: it stores no responses"


class ResponsesDialect(ConversationDialect):
    route = "/v1/responses"
    id_prefix = "resp_"
    prompt_param = "input"
    request: ResponsesRequest

    def __init__(self, stored: StoredResponses | None, request_id: str) -> None:
        """`stored`: the store for responses; None: responses are not stored."""
        super().__init__(request_id)
        self._stored = stored
        self._params = PARAMS
        self.callees: dict[str, Callee] = {}  # until `read`
        self._remembered: Remembered | None = None  # None: this response is not stored

    async def read(self, body: Body, scope: Scope) -> ChatRequest:
        """Turn the request into a chat that begins with the items of the response that it continues."""
        self.request = request = await body.made_into(partial(parse_body, ResponsesRequest))
        request.check()
        self._params, self.callees = request.params, request.callees()
        key = caller_of(scope).owner
        record = await self._earlier(request.previous_response_id, key)
        size = size_of(record)
        earlier = [] if record is None else await body.run(partial(items_before, record), size)
        items, referenced = await self._items(request.input, body.text, key)
        size += referenced
        self.chat = await body.run(partial(request.chat, earlier, items), size)
        if self._stored is None and request.stored:
            raise _cannot("background" if request.background else "store", NO_STORE)
        if self._stored is not None and request.store is not False:
            self._remembered = await body.run(partial(Remembered.of, items, earlier, key), size)
        return self.chat

    async def read_prompt(self, request: InputTokensRequest, model: str, text: TextModel, scope: Scope) -> None:
        """Turn the prompt of a response into a chat, to count its tokens. Raises: Rejected."""
        self._params = request.params
        key = caller_of(scope).owner
        record = await self._earlier(request.previous_response_id, key)
        size = size_of(record)
        earlier = [] if record is None else await text.run(size, partial(items_before, record))
        items, referenced = await self._items(request.input, text, key)
        self.chat = await text.run(size + referenced, partial(request.chat_with, model, earlier, items))

    async def _earlier(self, previous: str | None, key: bytes) -> StoredResponse | None:
        """Return the response that a request continues. Raises: Rejected."""
        if previous is None:
            return None
        if self._stored is None:
            raise _cannot("previous_response_id", NO_STORE)
        try:
            record = await self._stored.get(previous, key)
        except UnknownResponse:
            raise Rejected(
                f"Previous response with id '{previous[:128]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        if record.frontend:
            raise Rejected(
                f"Previous response with id '{previous}' has not ended yet.",
                param="previous_response_id",
                code="invalid_value",
            )
        return record

    async def _items(
        self, asked: Sequence[InputItem | ItemReference], text: TextModel, key: bytes
    ) -> tuple[list[InputItem], int]:
        """Return the input, with items of stored responses in the place of references, and the bytes read for them.

        Raises: Rejected, also for the second of two references to an item: a small request would make a huge prompt.
        """
        items: list[InputItem] = []
        stored: dict[str | None, InputItem] = {}
        searched: set[str] = set()
        size = 0
        for i, item in enumerate(asked):
            if not isinstance(item, ItemReference):
                items.append(item)
                continue
            if self._stored is None:
                raise _cannot(f"input[{i}].type", NO_STORE)
            response_id = response_of(item.id)
            if response_id not in searched:
                searched.add(response_id)
                with suppress(UnknownResponse):
                    record = await self._stored.get(response_id, key)
                    size += len(record.response)
                    stored |= {x.id: x for x in await text.run(len(record.response), partial(output_items, record))}
            if item.id not in stored:
                at = f"input[{i}].id"
                why = f"no stored response has an item '{item.id[:128]}', or it was referred to before"
                raise Rejected(f"Invalid '{at}': {why}.", param=at, code="invalid_value")
            items.append(stored.pop(item.id))
        return items, size

    @asynccontextmanager
    async def underway(self, reply: Reply, generation: Generation) -> AsyncIterator[None]:
        """Answer a background request at once. The response continues without its client until it is cancelled."""
        if self._stored is None or self._remembered is None or not self.request.background:
            yield
            return
        begun = self.begun(generation)
        with self._stored.underway(self.response_id) as mine:
            request_timeline().begin("frontend.store")
            await self._stored.put(begun, self._remembered)
            await reply.json(begun.model_dump_json().encode())
            try:
                with mine.cancellable():
                    yield
            except Cancelled:
                await self.kept(self.over("cancelled", [], generation))
                raise
            except Exception as exc:
                error = in_other_words(error_of(exc, self.request_id), self._params)
                await self.kept(self.over("failed", [], generation, error))
                raise

    def events(self, generation: Generation) -> EventStream:
        return ResponseStream(self, generation)

    async def answer(self, pieces: Sequence[Sequence[TextDelta]], generation: Generation) -> Parts:
        [mine] = pieces
        size = len(mine) + sum(len(piece.tokens or ()) for piece in mine)
        items = await generation.text.run(size, partial(items_of, mine, self, generation))
        response = await self.kept(self.over(status_of(generation), items, generation))
        return filled(response)

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        return super().refusal(in_other_words(error, self._params))

    def begun(self, generation: Generation) -> ResponseObject:
        sampling = generation.choices[0].prompt.sampling
        return ResponseObject.begun(
            self.response_id,
            self.created,
            self.request,
            store=self._remembered is not None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def over(
        self, status: ResponseStatus, items: Sequence[OutputItem], generation: Generation, error: ApiError | None = None
    ) -> ResponseObject:
        changes = {
            "status": status,
            "output": list(items),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "error": None if error is None else ResponseError(code=_code(error), message=error.message),
            "usage": ResponsesUsage.of(generation.usage()),
        }
        return self.begun(generation).model_copy(update=changes)

    async def kept(self, response: ResponseObject) -> ResponseObject:
        """Store `response` before its client reads it. If that fails, return it with `store` false."""
        if self._stored is None or self._remembered is None:
            return response
        put = self._stored.put_end if self.request.background else self._stored.put
        try:
            await put(response, self._remembered)
        except MeshError as exc:
            log.warning("response not stored", extra={"request_id": self.request_id, "cause": exc.message})
            return response.model_copy(update={"store": False})
        return response


class ResponseStream:
    def __init__(self, dialect: ResponsesDialect, generation: Generation) -> None:
        self._dialect = dialect
        self._generation = generation
        self._events = ResponseEvents(dialect.request_id, dialect.callees)
        self._begun = False
        self._ended = False
        self._tokens: list[ShownToken] = []  # without text so far: they are sent with the next ones

    def piece(self, piece: TextDelta) -> bytes:
        _, text, _, tokens, reasoning, calls, _ = piece
        logprobs: list[TokenLogprob] = []
        if tokens:
            self._tokens += tokens
            if text:
                logprobs, self._tokens = ChatLogprobs.of(self._tokens).content, []
        begin = b""
        if not self._begun:
            self._begun = True
            begin = self._events.begin(self._dialect.begun(self._generation))
        return begin + self._events.piece(reasoning, text, calls, logprobs)

    async def end(self) -> bytes:
        status = status_of(self._generation)
        last = end_of(self._events.blocks.all, self._generation)
        data, self._ended = self._events.end(last, ChatLogprobs.of(self._tokens).content), True
        response = await self._dialect.kept(self._dialect.over(status, self._events.items, self._generation))
        return data + self._events.last(status, response)

    def fail(self, error: ApiError) -> bytes:
        """Return the events for an error, with the output so far. It is not stored."""
        data = b"" if self._ended else self._events.end("incomplete")
        if self._generation.is_over:
            data = b""  # the error also replaces the last piece, so these events would contradict it
        data += self._events.error(_code(error), error.message)
        response = self._dialect.over("failed", self._events.items, self._generation, error)
        return data + self._events.last("failed", response.model_copy(update={"store": False}))


def items_of(pieces: Sequence[TextDelta], dialect: ResponsesDialect, generation: Generation) -> list[OutputItem]:
    """Return the items of a whole answer. An answer without text has one empty message."""
    blocks = Blocks()
    tokens: defaultdict[int, list[ShownToken]] = defaultdict(list)  # by the index of a block of text
    rest: list[ShownToken] = []  # without text so far: they belong to the next text
    for piece in pieces:
        rest += piece.tokens or ()
        for step in blocks.feed(piece.reasoning, piece.text, piece.calls):
            if step.block.kind == "text":
                tokens[step.block.index] += rest
                rest = []
    found = blocks.all or [Block("text", 0)]
    tokens[found[-1].index] += rest
    logprobs = [ChatLogprobs.of(tokens[block.index]).content for block in found]
    of = partial(item_of, request_id=dialect.request_id, callees=dialect.callees)
    items = [of(block, status="completed", logprobs=shown) for block, shown in zip(found, logprobs, strict=True)]
    return [*items[:-1], of(found[-1], status=end_of(found, generation), logprobs=logprobs[-1])]


def size_of(record: StoredResponse | None) -> int:
    """Return the characters of a stored response and of all before it."""
    return 0 if record is None else len(record.input) + len(record.earlier) + len(record.response)


def status_of(generation: Generation) -> Literal["completed", "incomplete"]:
    return "incomplete" if generation.choices[0].finish == "length" else "completed"


def end_of(blocks: Sequence[Block], generation: Generation) -> Status:
    """Return the status of the last item. A call may be incomplete even if the answer ended on its own."""
    finish = generation.choices[0].finish
    cut = bool(blocks) and blocks[-1].kind == "call" and finish != "tool_calls"
    return "incomplete" if cut or finish == "length" else "completed"


def _cannot(param: str, why: str) -> Rejected:
    return Rejected(f"'{param}' {why}.", param=param, code="unsupported_parameter")


def _code(error: ApiError) -> str:
    return "server_error" if error.status >= 500 else "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
