"""What every client is made to ask, and the form in which it tells what it got: one line of JSON."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

URL: Final = os.environ.get("ASKED_URL", "")  # of the frontend, without /v1
MODEL: Final = os.environ.get("ASKED_MODEL", "")

ASK: Final = "Name the capital of France."
ASK_FOR_PERSON: Final = "Describe a person."
ASK_FOR_WEATHER: Final = "What is the weather in Paris?"
MAX_TOKENS: Final = 500  # the model is to end by itself
ROOM: Final = 400  # tokens for what is held to a schema and ends by itself
TOO_LONG: Final = "word " * 9_000  # for a context of 8,192 tokens
NO_MODEL: Final = "no-such-model"
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """What structured output gives."""

    model_config = ConfigDict(extra="forbid")  # else the schema allows any others beside

    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=120)]


@dataclass(slots=True, kw_only=True)
class Told:
    """What a client got, in its own words."""

    versions: dict[str, str]
    answer: str
    usage: list[int]  # tokens of the prompt, of the answer
    pieces: list[str]  # of the same answer as a stream
    stream_usage: list[int]
    calls: list[tuple[str, Any]]  # name and arguments, as parsed by the client
    after_call: str  # the answer when it was told what the call gave
    person: Any
    errors: dict[str, tuple[str, str]]  # class and message


def tell(told: Told) -> None:
    """Print it."""
    print(json.dumps(asdict(told)))


def error_of(ask: Callable[[], Any], classes: type[Exception] | tuple[type[Exception], ...]) -> tuple[str, str]:
    """The class and the message of what `ask` raises, which is to be one of the client's own."""
    try:
        answer = ask()
    except classes as exc:
        return type(exc).__name__, str(exc)
    raise AssertionError(f"answered: {answer}")


def numbers(*counts: int | None) -> list[int]:
    """Counts of tokens that a client may lack, by its types."""
    assert None not in counts, "the client has no usage"
    return [count for count in counts if count is not None]


def texts(pieces: Sequence[str | None]) -> list[str]:
    """Without the empty ones."""
    return [piece for piece in pieces if piece]
