"""What differs between the routes that generate: how a body becomes prompts, and how text becomes an answer."""

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
from components.openai.events import DONE, Events
from components.openai.fields import AskedConstraint, FinishReason, GenerationFields, parse_body
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, ShownToken
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

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, told: bool) -> Self:
        """What all pieces of a choice make together; `told`: log-probabilities are asked for."""
        return cls(
            "".join([piece.text for piece in pieces]),
            cast("FinishReason", pieces[-1].finish),
            [token for piece in pieces for token in piece.tokens or ()] if told else None,
            "".join([piece.reasoning for piece in pieces]),
            whole_calls([call for piece in pieces for call in piece.calls]),
        )


class EventStream(Protocol):
    """The bytes of one stream of server-sent events."""

    def piece(self, piece: Piece) -> bytes:
        """What a piece of the answer adds; nothing, maybe, but for the first."""

    async def end(self) -> bytes:
        """What stands behind the last piece."""

    def fail(self, error: ApiError) -> bytes:
        """The last words of a stream that broke."""


class Dialect(ABC):
    """One request as its route sees it; `services.frontend.exchange` is the side that all routes share."""

    route: ClassVar[str]
    operation: ClassVar[str]  # as OpenTelemetry's GenAI conventions name it
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # the parameter to blame when the prompt is wrong
    continues: ClassVar[bool] = False  # whether the generation continues the prompt's text

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
        index, text, finish, tokens, reasoning, calls = piece
        if reasoning or calls:
            data = self._events.parts(index, text, reasoning, calls, self._logprobs(tokens))
        else:
            data = self._events.text(index, text, self._logprobs(tokens)) if text or tokens else b""
        if index not in self._opened:
            self._opened.add(index)
            data = self._events.open(index) + data
        return data if finish is None else data + self._events.finish(index, finish)

    async def end(self) -> bytes:
        """The usage, when it is asked for, and OpenAI's end mark."""
        if self._tells_usage:
            return self._events.usage(self._generation.usage()) + DONE
        return DONE

    def fail(self, error: ApiError) -> bytes:
        """The error as an event, and the end mark."""
        return b"data: " + error.body() + b"\n\n" + DONE


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
        self.output, self.asked = plan_answer(text, conversation, prompt, self.chat.asked_constraint)
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

    def events(self, generation: Generation) -> EventStream:
        """Chunks with a role and deltas."""
        request = self.chat
        events = Events.chat(
            self.response_id,
            self.created,
            request.model,
            usage_follows=request.include_usage,
            empty=self.output is None,
        )
        return ChunkStream(events, self.logprobs, generation, tells_usage=request.include_usage)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> bytes:
        """A chat completion."""
        made = [
            ChatChoice(
                index=i, message=said(choice), logprobs=self.logprobs(choice.tokens), finish_reason=choice.finish
            )
            for i, choice in enumerate(choices)
        ]
        completion = ChatCompletion(
            id=self.response_id, created=self.created, model=self.chat.model, choices=made, usage=generation.usage()
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
    continues = True
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
                prompts.append(await text.encode_text(prompt))
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
        events = Events.completion(self.response_id, self.created, request.model, usage_follows=request.include_usage)
        return ChunkStream(events, self.logprobs, generation, tells_usage=request.include_usage)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> bytes:
        """A text completion."""
        made = [
            CompletionChoice(index=i, text=text, logprobs=self.logprobs(tokens), finish_reason=finish)
            for i, (text, finish, tokens, *_) in enumerate(choices)
        ]
        completion = Completion(
            id=self.response_id, created=self.created, model=self.request.model, choices=made, usage=generation.usage()
        )
        return completion.model_dump_json().encode()

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        """Parallel lists."""
        return None if tokens is None else CompletionLogprobs.of(tokens)
