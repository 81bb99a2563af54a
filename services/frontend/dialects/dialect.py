"""What differs between the APIs: how a body becomes prompts, and how text becomes an answer."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol, Self, cast

from starlette.types import Scope

from components.openai.errors import ApiError
from components.openai.fields import AskedConstraint, FinishReason, GenerationFields
from components.openai.logprobs import ChatLogprobs, CompletionLogprobs, ShownToken, prompt_parts
from components.openai.parts import Items, Parts
from components.output.calls import Call, whole_calls
from components.output.plan import OutputPlan
from components.text.tokenizer import TextModel
from services.frontend.body import Body
from services.frontend.choice import Piece
from services.frontend.generation import Generation
from services.frontend.reply import Headers, Reply


class Answer(NamedTuple):
    text: str
    finish: FinishReason
    tokens: list[ShownToken] | None = None  # with log-probabilities, if they are asked for
    reasoning: str = ""
    calls: Sequence[Call] = ()
    token_ids: list[int] | None = None  # if they are asked for

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, has_logprobs: bool, has_ids: bool = False) -> Self:
        return cls(
            "".join([piece.text for piece in pieces]),
            cast("FinishReason", pieces[-1].finish),
            [token for piece in pieces for token in piece.tokens or ()] if has_logprobs else None,
            "".join([piece.reasoning for piece in pieces]),
            whole_calls([call for piece in pieces for call in piece.calls]),
            [token_id for piece in pieces for token_id in piece.token_ids] if has_ids else None,
        )


class Encoded(NamedTuple):
    """The prompts of a request, and what their answers are to be."""

    prompts: list[list[int]]
    echoes: Sequence[str] = ()  # for each prompt, the text to show before its choices' own; empty: none
    output: OutputPlan | None = None  # how to parse the generated text; None: it is shown as it is
    asked: AskedConstraint | None = None  # what the text must be, in place of what the request's fields say


class EventStream(Protocol):
    """The server-sent events of one answer, as bytes."""

    def piece(self, piece: Piece) -> bytes:
        """Events for a piece of the answer; may be empty, except for the first piece."""

    async def end(self) -> bytes:
        """Events after the last piece."""

    def fail(self, error: ApiError) -> bytes:
        """The last events of a stream that broke."""


class Dialect(ABC):
    """One request of one API. `services.frontend.exchange` is the part that all APIs share.

    It calls, in this order: `read`, `token_limit`, `encode`; then, inside `underway`, either `events` or `answer`. A failure
    at any point becomes `refusal`. `headers` is called first.
    """

    route: ClassVar[str]
    operation: ClassVar[str]  # in OpenTelemetry's GenAI conventions
    id_prefix: ClassVar[str]
    prompt_param: ClassVar[str]  # named by errors about the prompt

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.response_id = self.id_prefix + request_id
        self.created = int(time.time())

    def headers(self, shown_id: str) -> Headers:
        """Headers of every answer. `shown_id`: the request's id for the client."""
        return [(b"x-request-id", shown_id.encode())]

    @abstractmethod
    async def read(self, body: Body, scope: Scope) -> GenerationFields:
        """Parse the body. Returns the fields that all APIs share. Raises: MeshError."""

    @abstractmethod
    def token_limit(self) -> int | None:
        """The most tokens of a choice that the request asks for. Raises: Rejected."""

    @abstractmethod
    async def encode(self, text: TextModel) -> Encoded:
        """Tokenise the prompts. Raises: Rejected."""

    def underway(self, reply: Reply, generation: Generation) -> AbstractAsyncContextManager[None]:
        """Entered around admission and generation, once the request is known to be valid."""
        return nullcontext()

    @abstractmethod
    def events(self, generation: Generation) -> EventStream:
        """Begin a streamed answer."""

    @abstractmethod
    async def answer(self, choices: Sequence[Answer], generation: Generation) -> Parts:
        """Make the JSON of an answer that is not streamed."""

    def refusal(self, error: ApiError) -> tuple[int, bytes]:
        """Status and JSON of a request that failed."""
        return error.status, error.body()


def prompt_extras(
    request: GenerationFields, generation: Generation, index: int
) -> tuple[list[int] | None, dict[str, Items]]:
    """The token ids of a choice's prompt, and the list that fills its log-probabilities, each if it is asked for."""
    choice, count = generation.choices[index], request.prompt_logprobs
    token_ids = choice.prompt.token_ids
    lists: dict[str, Items] = {}
    if count is not None and choice.prompt_logprobs is not None:
        of = generation.text.token_bytes.of
        lists["prompt_logprobs"] = prompt_parts(token_ids, choice.prompt_logprobs, count, of)
    return token_ids if request.return_token_ids else None, lists


def logprob_lists(logprobs: type[ChatLogprobs | CompletionLogprobs], choice: Answer) -> dict[str, Items]:
    return {} if choice.tokens is None else logprobs.parts(choice.tokens)
