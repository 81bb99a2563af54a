"""`/v1/completions`: request and answer."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, JsonValue, PlainValidator

from components.errors import Rejected
from components.openai.fields import (
    INT32_MAX,
    MAX_BRANCHES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    FinishReason,
    IfAsked,
    Usage,
    invalid,
    only,
)
from components.openai.logprobs import CompletionLogprobs, PromptLogprobs
from components.openai.structured import ConstrainedFields

MAX_PROMPTS: Final = 128


def prompts(value: JsonValue, most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """The prompts, texts or token ids, from any form of `prompt`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("must be a string, a list of strings, token ids, or a list of lists of token ids")
    if all(isinstance(item, str) for item in value):
        found: list[str | list[int]] = [str(item) for item in value]
    elif isinstance(value[0], list):
        found = [token_ids(item, f"[{i}]") for i, item in enumerate(value)]
    else:
        found = [token_ids(value)]
    if len(found) > most:
        raise invalid(f"has {len(found)} texts, at most {most} are allowed")
    return found


def token_ids(value: JsonValue, at: str = "") -> list[int]:
    """Check token ids. `at`: path below the field, for errors."""
    if not isinstance(value, list):
        raise invalid("must be a list of token ids", at=at)
    if not value:
        raise invalid("must not be empty", at=at)
    ids = [item for item in value if type(item) is int]  # a bool is an int to isinstance
    if len(ids) != len(value) or min(ids) < 0 or max(ids) > INT32_MAX:
        raise invalid("must have token ids: integers of at least 0", at=at)
    return ids


DEFAULT_TOKENS: Final = 16  # OpenAI's


class CompletionRequest(ConstrainedFields):
    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    # 0: the answer is the prompt alone
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    # not supported yet
    suffix: Annotated[JsonValue, only("")] = None

    @property
    def token_limit(self) -> int:
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echo_alternatives(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def continues(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise Rejected(
                "Invalid 'max_tokens': 0 requests an empty answer. Send at least 1, or send 'echo' or 'prompt_logprobs' to "
                "see the prompt.",
                param="max_tokens",
                code="invalid_value",
            )
        choices = len(self.prompt) * (self.n or 1)
        if choices > MAX_BRANCHES:
            raise Rejected(
                f"Invalid 'n': {len(self.prompt)} prompts with {self.n} choices each are {choices}, "
                f"at most {MAX_BRANCHES} are allowed in one request.",
                param="n",
                code="invalid_value",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Rejected(
                "'best_of' has a value that this server does not support: send the value of 'n' or leave it out.",
                param="best_of",
                code="unsupported_parameter",
            )


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise Rejected(
            f"Invalid '{param}': token id {worst} is outside the model's vocabulary of {vocab_size}.",
            param=param,
            code="invalid_value",
        )


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason
    token_ids: IfAsked[list[int]] = None
    prompt_token_ids: IfAsked[list[int]] = None
    prompt_logprobs: IfAsked[PromptLogprobs] = None


class Completion(BaseModel):
    """The answer to a completion request without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None = None
