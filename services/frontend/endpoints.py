"""What differs between the routes that generate: how a body becomes prompts, and how text becomes an answer."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol, Self, cast

from pydantic import BaseModel
from starlette.types import Scope

from components.openai.chat import CallMade, ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from components.openai.completions import Completion, CompletionChoice, CompletionRequest, check_vocabulary
from components.openai.errors import ApiError
from components.openai.events import DONE, NOTHING, Events, More, member
from components.openai.fields import AskedConstraint, FinishReason, GenerationFields, parse_body
from components.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    ShownToken,
    prompt_logprobs,
)
from components.output.calls import Call, whole_calls
from components.output.plan import OutputPlan
from components.text.tokenizer import TextModel
from services.frontend.conversation import encode_conversation, plan_answer
from services.frontend.generation import Generation, Piece
from services.frontend.stream import Headers, Reply


class Answer(NamedTuple):
    """What one choice has become."""

    text: str
    finish: FinishReason
    tokens: list[ShownToken] | None = None  # when log-probabilities are asked for
    reasoning: str = ""
    calls: Sequence[Call] = ()  # of tools
    token_ids: list[int] | None = None  # when they are asked for

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, told: bool, tells_ids: bool = False) -> Self:
        """What all pieces of a choice make together; `told`: log-probabilities are asked for; `tells_ids`: token ids."""
        return cls(
            "".join([piece.text for piece in pieces]),
            cast("FinishReason", pieces[-1].finish),
            [token for piece in pieces for token in piece.tokens or ()] if told else None,
            "".join([piece.reasoning for piece in pieces]),
            whole_calls([call for piece in pieces for call in piece.calls]),
            [token_id for piece in pieces for token_id in piece.token_ids] if tells_ids else None,
        )


class EventStream(Protocol):
    """The bytes of one stream of server-sent events."""

    def piece(self, piece: Piece) -> bytes:
        """What a piece of the answer adds; nothing, maybe, but for the first."""

    async def end(self) -> bytes:
        """What stands behind the last piece."""

    def fail(self, error: ApiError) -> bytes:
        """The last words of a stream that broke."""


class EventOutlet:
    """See `services.frontend.generation.Outlet`: pieces become events and leave in the same turn of the loop."""

    __slots__ = ("_events", "_reply")

    def __init__(self, reply: Reply, events: EventStream) -> None:
        self._reply = reply
        self._events = events

    @property
    def is_open(self) -> bool:
        """Once the first event is out, and while the client reads."""
        return self._reply.can_push

    def send(self, piece: Piece) -> None:
        """Its event."""
        if data := self._events.piece(piece):
            self._reply.push(data)


class Dialect(ABC):
    """One request as its route sees it; `services.frontend.exchange` is the side that all routes share."""

    route: ClassVar[str]
    operation: ClassVar[str]  # as OpenTelemetry's GenAI conventions name it
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # the parameter to blame when the prompt is wrong

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.response_id = self.id_prefix + request_id
        self.created = int(time.time())
        # known once the prompts are
        self.output: OutputPlan | None = None  # what texts are to be taken apart into
        self.asked: AskedConstraint | None = None  # what they must be, when that is not what the request's fields say

    @abstractmethod
    async def read(self, body: bytes, scope: Scope) -> GenerationFields:
        """Take the request in; what of it all routes share. Raises: MeshError."""

    @abstractmethod
    def token_limit(self) -> int | None:
        """The most tokens to generate for each choice. Raises: Rejected."""

    @abstractmethod
    async def encode(self, text: TextModel) -> list[list[int]]:
        """The prompts of the request. Raises: Rejected."""

    def echoes(self, text: TextModel, prompts: Sequence[list[int]]) -> list[str]:
        """For each prompt, text to show before the choices' own."""
        return [""] * len(prompts)

    def underway(self, reply: Reply, generation: Generation) -> AbstractAsyncContextManager[None]:
        """Around the generation, once the request is found to be right."""
        return nullcontext()

    @abstractmethod
    def events(self, generation: Generation) -> EventStream:
        """The bytes of a stream."""

    @abstractmethod
    async def answer(self, choices: Sequence[Answer], generation: Generation) -> bytes:
        """The JSON of an answer in one piece."""

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        """Status and JSON of a request that failed."""
        return error.status, error.body()

    def headers(self, shown_id: str) -> Headers:
        """Of every answer; `shown_id` is what the request is called in it."""
        return [(b"x-request-id", shown_id.encode())]


class ChunkStream:
    """A stream of chunks, as chats and completions have it."""

    __slots__ = ("_events", "_generation", "_logprobs", "_opened", "_tells_usage")

    def __init__(
        self,
        events: Events,
        logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
        generation: Generation,
        *,
        tells_usage: bool,
    ) -> None:
        self._events = events
        self._logprobs = logprobs
        self._generation = generation
        self._tells_usage = tells_usage
        self._opened: set[int] = set()

    def piece(self, piece: Piece) -> bytes:
        """A chunk for the text, and one for the end of its choice; before its first one, the opening."""
        index = piece.choice
        data = self._text(piece) if piece.tells else b""
        if index not in self._opened:
            self._opened.add(index)
            data = self._events.open(index) + data
        return data if piece.finish is None else data + self._events.finish(index, piece.finish)

    async def end(self) -> bytes:
        """The usage, when it is asked for, and OpenAI's end mark."""
        if self._tells_usage:
            return self._events.usage(self._generation.usage()) + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """The error as an event, and the end mark."""
        return b"data: " + error.body() + b"\n\n" + DONE

    def _text(self, piece: Piece, more: More = NOTHING) -> bytes:
        """What is new in it."""
        index, text, logprobs = piece.choice, piece.text, self._logprobs(piece.tokens)
        if piece.reasoning or piece.calls:
            return self._events.parts(index, text, piece.reasoning, piece.calls, logprobs=logprobs, more=more)
        return self._events.text(index, text, logprobs, more)


class TellingStream(ChunkStream):
    """One whose chunks tell more, as vLLM has it: token ids, and the usage so far in each."""

    __slots__ = ("_tells_ids", "_tells_usage_so_far")

    def __init__(
        self,
        events: Events,
        logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
        generation: Generation,
        request: GenerationFields,
    ) -> None:
        super().__init__(events, logprobs, generation, tells_usage=request.include_usage)
        self._tells_ids = bool(request.return_token_ids)
        self._tells_usage_so_far = request.continuous_usage

    def piece(self, piece: Piece) -> bytes:
        """A chunk wherever there are new tokens, though they may have no text yet."""
        index, data = piece.choice, b""
        usage = member("usage", self._generation.usage().model_dump_json()) if self._tells_usage_so_far else b""
        first = index not in self._opened
        if first:
            self._opened.add(index)
            data = self._events.open(index, More(usage=usage))
        if piece.tells or piece.token_ids:
            # a chat has one prompt, and tells it once
            once = self._tells_ids and first and self._events.opening is not None and index == 0
            prompt_ids = self._prompt_ids(index) if once else b""
            data += self._text(piece, More(self._ids(piece, first=first), prompt_ids, usage))
        return data if piece.finish is None else data + self._events.finish(index, piece.finish, More(usage=usage))

    def _ids(self, piece: Piece, *, first: bool) -> bytes:
        """Of a choice; a completion's first chunk tells its prompt's too."""
        if not self._tells_ids:
            return b""
        own = member("token_ids", json.dumps(list(piece.token_ids)))
        return self._prompt_ids(piece.choice) + own if first and self._events.opening is None else own

    def _prompt_ids(self, index: int) -> bytes:
        return member("prompt_token_ids", json.dumps(self._generation.choices[index].prompt.token_ids))


def _chunks(
    request: GenerationFields,
    events: Events,
    logprobs: Callable[[Sequence[ShownToken] | None], BaseModel | None],
    generation: Generation,
) -> ChunkStream:
    """Decided once: most streams tell nothing more."""
    if request.return_token_ids or request.continuous_usage:
        return TellingStream(events, logprobs, generation, request)
    return ChunkStream(events, logprobs, generation, tells_usage=request.include_usage)


def _told_prompt(
    request: GenerationFields, generation: Generation, index: int
) -> tuple[list[int] | None, PromptLogprobs | None]:
    """Of the prompt of a choice, what is asked for: its token ids, its log-probabilities."""
    choice, count = generation.choices[index], request.prompt_logprobs
    token_ids = choice.prompt.token_ids
    told = None
    if count is not None and choice.prompt_told is not None:
        told = prompt_logprobs(token_ids, choice.prompt_told, count, generation.text.token_bytes.of)
    return token_ids if request.return_token_ids else None, told


class Conversing(Dialect):
    """A request that is a chat, whatever its route calls it."""

    operation = "chat"
    chat: ChatRequest

    def token_limit(self) -> int | None:
        """Under either name."""
        return self.chat.token_limit

    async def encode(self, text: TextModel) -> list[list[int]]:
        """One prompt: the conversation in the model's template."""
        conversation = self.chat.conversation()
        prompt = await encode_conversation(text, conversation)
        self.output, self.asked = await plan_answer(text, conversation, prompt, self.chat.asked_constraint)
        return [prompt]


class ChatDialect(Conversing):
    """`/v1/chat/completions`."""

    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_param = "messages"

    async def read(self, body: bytes, scope: Scope) -> ChatRequest:
        """A chat request."""
        self.chat = parse_body(ChatRequest, body)
        return self.chat

    def echoes(self, text: TextModel, prompts: Sequence[list[int]]) -> list[str]:
        """The message that goes on, when the request asks for it."""
        return [self.chat.messages[-1].text if self.chat.echo else ""]

    def events(self, generation: Generation) -> EventStream:
        """Chunks with a role and deltas."""
        request = self.chat
        events = Events.chat(
            self.response_id,
            self.created,
            request.model,
            usage_follows=request.announces_usage,
            empty=self.output is None,
        )
        return _chunks(request, events, self.logprobs, generation)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> bytes:
        """A chat completion."""
        made = [
            ChatChoice(
                index=i,
                message=said(choice),
                logprobs=self.logprobs(choice.tokens),
                finish_reason=choice.finish,
                token_ids=choice.token_ids,
            )
            for i, choice in enumerate(choices)
        ]
        token_ids, logprobs = _told_prompt(self.chat, generation, 0)
        completion = ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.chat.model,
            choices=made,
            usage=generation.usage(),
            prompt_token_ids=token_ids,
            prompt_logprobs=logprobs,
        )
        return completion.model_dump_json().encode()

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        """A list of tokens."""
        return None if tokens is None else ChatLogprobs.of(tokens)


def said(choice: Answer) -> ChatMessage:
    """The message of a choice: without content where there is none beside reasoning or calls."""
    return ChatMessage(
        content=choice.text or (None if choice.reasoning or choice.calls else ""),
        reasoning_content=choice.reasoning or None,
        reasoning=choice.reasoning or None,
        tool_calls=[CallMade.of(call) for call in choice.calls] or None,
    )


class CompletionDialect(Dialect):
    """`/v1/completions`."""

    route = "/v1/completions"
    operation = "text_completion"
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    request: CompletionRequest

    async def read(self, body: bytes, scope: Scope) -> CompletionRequest:
        """A completion request."""
        self.request = parse_body(CompletionRequest, body)
        return self.request

    def token_limit(self) -> int | None:
        """Of each prompt."""
        return self.request.token_limit

    async def encode(self, text: TextModel) -> list[list[int]]:
        """Texts tokenised; token ids as they are, if the model knows them."""
        prompts: list[list[int]] = []
        for prompt in self.request.prompt:
            if isinstance(prompt, str):
                special = self.request.add_special_tokens is not False
                prompts.append(await text.encode_text(prompt, add_special_tokens=special))
            else:
                check_vocabulary(prompt, text.vocab_size, "prompt")
                prompts.append(prompt)
        return prompts

    def echoes(self, text: TextModel, prompts: Sequence[list[int]]) -> list[str]:
        """The prompts, when the request asks for them."""
        if not self.request.echo:
            return [""] * len(prompts)
        return [given if isinstance(given, str) else text.decode(given) for given in self.request.prompt]

    def events(self, generation: Generation) -> EventStream:
        """Chunks with text."""
        request = self.request
        events = Events.completion(self.response_id, self.created, request.model, usage_follows=request.announces_usage)
        return _chunks(request, events, self.logprobs, generation)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> bytes:
        """A text completion."""
        made = [self._choice(i, choice, generation) for i, choice in enumerate(choices)]
        completion = Completion(
            id=self.response_id, created=self.created, model=self.request.model, choices=made, usage=generation.usage()
        )
        return completion.model_dump_json().encode()

    def _choice(self, index: int, choice: Answer, generation: Generation) -> CompletionChoice:
        token_ids, logprobs = _told_prompt(self.request, generation, index)
        return CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=self.logprobs(choice.tokens),
            finish_reason=choice.finish,
            token_ids=choice.token_ids,
            prompt_token_ids=token_ids,
            prompt_logprobs=logprobs,
        )

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        """Parallel lists."""
        return None if tokens is None else CompletionLogprobs.of(tokens)
