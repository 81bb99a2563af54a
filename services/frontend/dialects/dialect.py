"""What differs between the APIs: how a body is turned into prompts, and text into an answer."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol

from starlette.types import Scope

from components.openai.chat import ChatRequest
from components.openai.errors import ApiError
from components.openai.fields import AskedConstraint, GenerationFields
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_parts
from components.openai.parts import Items, Parts
from components.output.plan import OutputPlan
from components.text.tokenizer import TextModel
from services.frontend.answer_form import AnswerForm
from services.frontend.choice import TextDelta
from services.frontend.conversation import AnswerPlan, conversation_of, encode_conversation, plan_answer
from services.frontend.generation import Generation
from services.frontend.incoming import Body
from services.frontend.reply import Reply


class Encoded(NamedTuple):
    prompts: list[list[int]]
    echoes: Sequence[str] = ()  # text returned before each prompt's choices; empty: none
    output: OutputPlan | None = None  # how to parse the text; None: it is shown as it is
    asked: AskedConstraint | None = None  # replaces the constraint in the request's fields
    prediction: Sequence[int] = ()  # tokens that the answers may repeat


class EventStream(Protocol):
    def piece(self, piece: TextDelta) -> bytes:
        """Return the events for a piece of the answer; may be empty, except for the first piece."""

    async def end(self) -> bytes:
        """Return the events after the last piece."""

    def fail(self, error: ApiError) -> bytes:
        pass


class Dialect(AnswerForm, ABC):
    """One request of one API.

    `Exchange` calls, in this order: `headers`, `read`, `token_limit`, `encode`; then, inside `underway`, either `events` or
    `answer`. Each may raise a MeshError, which becomes a `refusal`.
    """

    route: ClassVar[str]
    operation: ClassVar[str]  # in OpenTelemetry's GenAI conventions
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # named by errors about the prompt

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.response_id = self.id_prefix + request_id
        self.created = int(time.time())

    @abstractmethod
    async def read(self, body: Body, scope: Scope) -> GenerationFields:
        """Returns: the fields that all APIs share."""

    @abstractmethod
    def token_limit(self) -> int | None:
        """The most tokens to generate for each choice; None: the rest of the context."""

    @abstractmethod
    async def encode(self, text: TextModel) -> Encoded: ...

    def underway(self, reply: Reply, generation: Generation) -> AbstractAsyncContextManager[None]:
        """Return a context that is open during admission and generation, for a request that has been validated."""
        return nullcontext()

    @abstractmethod
    def events(self, generation: Generation) -> EventStream: ...

    @abstractmethod
    async def answer(self, pieces: Sequence[Sequence[TextDelta]], generation: Generation) -> Parts:
        """The JSON of an answer that is not streamed. `pieces`: of each choice, in order."""


class ConversationDialect(Dialect):
    """The base of chat, responses and messages."""

    operation = "chat"
    chat: ChatRequest
    plan = AnswerPlan()  # until `encode`

    def token_limit(self) -> int | None:
        return self.chat.token_limit

    async def encode(self, text: TextModel) -> Encoded:
        conversation = await conversation_of(text, self.chat)
        prompt = await encode_conversation(text, conversation)
        self.plan = await plan_answer(text, conversation, prompt, self.chat.asked_constraint)
        echo = self.chat.messages[-1].text if self.chat.echo else ""
        predicted = self.chat.prediction
        prediction = [] if predicted is None else await text.encode_text(predicted.content, add_special_tokens=False)
        return Encoded([prompt], [echo], self.plan.output, self.plan.asked, prediction)


def whole_choices(pieces: Sequence[Sequence[TextDelta]], request: GenerationFields) -> list[TextDelta]:
    return [TextDelta.joined(mine, has_logprobs=request.alternatives is not None) for mine in pieces]


def prompt_extras(
    request: GenerationFields, generation: Generation, index: int
) -> tuple[list[int] | None, dict[str, Items]]:
    """Return what the request asks for about a choice's prompt: its token ids, and the list of its log-probabilities."""
    choice, count = generation.choices[index], request.prompt_logprobs
    token_ids = choice.prompt.token_ids
    lists: dict[str, Items] = {}
    if count is not None and choice.prompt_logprobs is not None:
        of = generation.text.token_bytes.of
        lists["prompt_logprobs"] = prompt_parts(token_ids, choice.prompt_logprobs, count, of)
    return token_ids if request.return_token_ids else None, lists


Logprobs = type[ChatLogprobs | CompletionLogprobs]


def logprob_lists(logprobs: Logprobs, choice: TextDelta) -> dict[str, Items]:
    return {} if choice.tokens is None else logprobs.parts(choice.tokens)
