"""What differs between the routes that generate: how a body becomes prompts, and how text becomes an answer."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import ClassVar, NamedTuple, Self, cast

from pydantic import BaseModel
from starlette.types import Scope

from components.openai.chat import CallMade, ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from components.openai.completions import Completion, CompletionChoice, CompletionRequest, check_vocabulary
from components.openai.errors import ApiError
from components.openai.events import Events
from components.openai.fields import AskedConstraint, FinishReason, GenerationFields, parse_body
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, ShownToken, prompt_parts
from components.openai.parts import Items, Parts, filled
from components.output.calls import Call, whole_calls
from components.output.plan import OutputPlan
from components.text.tokenizer import TextModel
from services.frontend.body import Body
from services.frontend.conversation import encode_conversation, plan_answer
from services.frontend.event_streams import EventStream, chunks
from services.frontend.generation import Generation, Piece
from services.frontend.reply import Headers, Reply


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
    async def read(self, body: Body, scope: Scope) -> GenerationFields:
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
    async def answer(self, choices: Sequence[Answer], generation: Generation) -> Parts:
        """The JSON of an answer that is not streamed."""

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        """Status and JSON of a request that failed."""
        return error.status, error.body()

    def headers(self, shown_id: str) -> Headers:
        """Of every answer; `shown_id` is what the request is called in it."""
        return [(b"x-request-id", shown_id.encode())]


def _told_prompt(
    request: GenerationFields, generation: Generation, index: int
) -> tuple[list[int] | None, Items | None]:
    """Of the prompt of a choice, what is asked for: its token ids, its log-probabilities."""
    choice, count = generation.choices[index], request.prompt_logprobs
    token_ids = choice.prompt.token_ids
    told = None
    if count is not None and choice.prompt_logprobs is not None:
        told = prompt_parts(token_ids, choice.prompt_logprobs, count, generation.text.token_bytes.of)
    return token_ids if request.return_token_ids else None, told


def _told(logprobs: type[ChatLogprobs | CompletionLogprobs], choice: Answer) -> dict[str, Items]:
    """The lists to fill the log-probabilities of a choice with."""
    return {} if choice.tokens is None else logprobs.parts(choice.tokens)


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

    async def read(self, body: Body, scope: Scope) -> ChatRequest:
        """A chat request."""
        self.chat = await body.made_into(partial(parse_body, ChatRequest))
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
        return chunks(request, events, self.logprobs, generation)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> Parts:
        """A chat completion."""
        token_ids, told = _told_prompt(self.chat, generation, 0)
        completion = ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.chat.model,
            choices=[],
            usage=generation.usage(),
            prompt_token_ids=token_ids,
            prompt_logprobs=None if told is None else [],
        )
        made = (self._choice(i, choice) for i, choice in enumerate(choices))
        return filled(completion, choices=made, **({} if told is None else {"prompt_logprobs": told}))

    def _choice(self, index: int, choice: Answer) -> Parts:
        made = ChatChoice(
            index=index,
            message=said(choice),
            logprobs=None if choice.tokens is None else ChatLogprobs.of(()),
            finish_reason=choice.finish,
            token_ids=choice.token_ids,
        )
        return filled(made, **_told(ChatLogprobs, choice))

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

    async def read(self, body: Body, scope: Scope) -> CompletionRequest:
        """A completion request."""
        self.request = await body.made_into(partial(parse_body, CompletionRequest))
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
                await text.run(len(prompt), partial(check_vocabulary, prompt, text.vocab_size, "prompt"))
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
        return chunks(request, events, self.logprobs, generation)

    async def answer(self, choices: Sequence[Answer], generation: Generation) -> Parts:
        """A text completion."""
        completion = Completion(
            id=self.response_id, created=self.created, model=self.request.model, choices=[], usage=generation.usage()
        )
        return filled(completion, choices=(self._choice(i, choice, generation) for i, choice in enumerate(choices)))

    def _choice(self, index: int, choice: Answer, generation: Generation) -> Parts:
        token_ids, told = _told_prompt(self.request, generation, index)
        made = CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None if choice.tokens is None else CompletionLogprobs.of(()),
            finish_reason=choice.finish,
            token_ids=choice.token_ids,
            prompt_token_ids=token_ids,
            prompt_logprobs=None if told is None else [],
        )
        lists = _told(CompletionLogprobs, choice)
        return filled(made, **lists, **({} if told is None else {"prompt_logprobs": told}))

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        """Parallel lists."""
        return None if tokens is None else CompletionLogprobs.of(tokens)
