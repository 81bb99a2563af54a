"""What differs between the routes that generate: how a body becomes prompts, and how text becomes an answer."""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel

from components.openai.chat import ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from components.openai.completions import Completion, CompletionChoice, CompletionRequest, check_vocabulary
from components.openai.events import Events
from components.openai.fields import FinishReason, GenerationFields, Usage
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, ShownToken
from components.text.tokenizer import TextModel

R_contra = TypeVar("R_contra", bound=GenerationFields, contravariant=True)


class Answer(NamedTuple):
    """What one choice has become."""

    text: str
    finish: FinishReason
    tokens: list[ShownToken] | None = None  # when log-probabilities are asked for


class Dialect(Protocol[R_contra]):
    """One route's side of a request's life; `services.frontend.exchange` is the common side."""

    route: str
    operation: str  # as OpenTelemetry's GenAI conventions name it
    id_prefix: str
    prompt_param: str  # the parameter to blame when the prompt is wrong
    continues: bool  # whether the generation continues the prompt's text

    def token_limit(self, request: R_contra) -> int | None:
        """The most tokens to generate for each choice. Raises: Rejected."""

    async def encode(self, text: TextModel, request: R_contra) -> list[list[int]]:
        """The prompts of the request. Raises: Rejected."""

    def echoes(self, text: TextModel, request: R_contra, prompts: Sequence[list[int]]) -> list[str]:
        """For each prompt, text to show before the choices' own."""

    def events(self, response_id: str, created: int, request: R_contra) -> Events:
        """The bytes of a stream."""

    def answer(self, response_id: str, created: int, model: str, choices: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON of an answer in one piece."""

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> BaseModel | None:
        """What is told of tokens."""


class ChatDialect:
    """`/v1/chat/completions`."""

    route: str = "/v1/chat/completions"
    operation: str = "chat"
    id_prefix: str = "chatcmpl-"
    prompt_param: str = "messages"
    continues: bool = False

    def token_limit(self, request: ChatRequest) -> int | None:
        """Under either name."""
        return request.token_limit

    async def encode(self, text: TextModel, request: ChatRequest) -> list[list[int]]:
        """One prompt: the conversation in the model's template."""
        return [await text.encode_chat([message.for_template() for message in request.messages])]

    def echoes(self, text: TextModel, request: ChatRequest, prompts: Sequence[list[int]]) -> list[str]:
        """None: a chat answers."""
        return [""] * len(prompts)

    def events(self, response_id: str, created: int, request: ChatRequest) -> Events:
        """Chunks with a role and deltas."""
        return Events.chat(response_id, created, request.model, usage_follows=request.include_usage)

    def answer(self, response_id: str, created: int, model: str, choices: Sequence[Answer], usage: Usage) -> bytes:
        """A chat completion."""
        made = [
            ChatChoice(index=i, message=ChatMessage(content=text), logprobs=self.logprobs(tokens), finish_reason=finish)
            for i, (text, finish, tokens) in enumerate(choices)
        ]
        completion = ChatCompletion(id=response_id, created=created, model=model, choices=made, usage=usage)
        return completion.model_dump_json().encode()

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> ChatLogprobs | None:
        """A list of tokens."""
        return None if tokens is None else ChatLogprobs.of(tokens)


class CompletionDialect:
    """`/v1/completions`."""

    route: str = "/v1/completions"
    operation: str = "text_completion"
    id_prefix: str = "cmpl-"
    prompt_param: str = "prompt"
    continues: bool = True

    def token_limit(self, request: CompletionRequest) -> int | None:
        """Of each prompt."""
        return request.token_limit

    async def encode(self, text: TextModel, request: CompletionRequest) -> list[list[int]]:
        """Texts tokenised; token ids as they are, if the model knows them."""
        prompts: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                prompts.append(await text.encode_text(prompt))
            else:
                check_vocabulary(prompt, text.vocab_size, "prompt")
                prompts.append(prompt)
        return prompts

    def echoes(self, text: TextModel, request: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
        """The prompts, when the request asks for them."""
        if not request.echo:
            return [""] * len(prompts)
        return [given if isinstance(given, str) else text.decode(given) for given in request.prompt]

    def events(self, response_id: str, created: int, request: CompletionRequest) -> Events:
        """Chunks with text."""
        return Events.completion(response_id, created, request.model, usage_follows=request.include_usage)

    def answer(self, response_id: str, created: int, model: str, choices: Sequence[Answer], usage: Usage) -> bytes:
        """A text completion."""
        made = [
            CompletionChoice(index=i, text=text, logprobs=self.logprobs(tokens), finish_reason=finish)
            for i, (text, finish, tokens) in enumerate(choices)
        ]
        completion = Completion(id=response_id, created=created, model=model, choices=made, usage=usage)
        return completion.model_dump_json().encode()

    def logprobs(self, tokens: Sequence[ShownToken] | None) -> CompletionLogprobs | None:
        """Parallel lists."""
        return None if tokens is None else CompletionLogprobs.of(tokens)


CHAT: Final = ChatDialect()
COMPLETION: Final = CompletionDialect()
