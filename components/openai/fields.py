"""Shared fields, and parsing of a body into a request or an error that names the parameter.

Unknown fields are refused. A known, unsupported field declares its neutral values; others are refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import jiter
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PlainValidator,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from components.errors import Rejected
from components.openai.json_size import check_text, check_value
from components.wire.sampling import Constraint
from components.wire.step_stats import DraftCounts

MAX_CHOICES: Final = 128  # `n` per prompt
MAX_BRANCHES: Final = 512  # per request, over all prompts
MAX_ERROR_CHARS: Final = 256  # of an error message that quotes the client
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1024
MAX_LOGIT_BIAS: Final = 1024
MAX_BIAS: Final = 100
MAX_PRIORITY: Final = 127  # 256 later requests may overtake for each step
INT32_MAX: Final = 2**31 - 1
CODES: Final = {  # OpenAI's codes by pydantic's error types; others are invalid_value
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
}
SHAPES: Final = {  # error texts in JSON's terms rather than Python's
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be an array",
}

R = TypeVar("R", bound=BaseModel)

_UNKNOWN_TYPE: Final = "has a value that this server does not support: it accepts {kinds}"


class Strict(BaseModel):
    """Base of request models: no unknown fields, no coercion, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


def only(*neutral: JsonValue, instead: str = "") -> AfterValidator:
    """Accept null and these values; refuse others as unsupported. `instead`: the field to use."""
    shown = " or ".join(repr(value).lower() if isinstance(value, bool) else repr(value) for value in neutral)
    what = "has a value that this server does not support" if neutral and not instead else "is not supported"
    hint = f"use '{instead}'" if instead else f"send {shown} or leave it out" if neutral else "leave it out"

    def check(value: JsonValue) -> JsonValue:
        if value is None or any(_same(value, allowed) for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported", "{what}: {hint}", {"what": what, "hint": hint})

    return AfterValidator(check)


def _same(value: JsonValue, allowed: JsonValue) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)  # in Python True == 1


def invalid(message: str, at: str = "") -> PydanticCustomError:
    """`at`: path below the field, such as `[0].type`."""
    return PydanticCustomError("value_error", message, {"at": at})


def tagged(kind: str) -> Tag:
    return Tag(f"<{kind}>")


class _ByType(Discriminator):
    """Members of a union must be hashable; the context is a dict."""

    __hash__ = object.__hash__


def by_type(*kinds: str, default: str = "", note: str = "") -> Discriminator:
    """Choose a union's model by an object's `type`, else by `default`. `note`: what the refusal adds."""

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, Mapping) else getattr(value, "type", default)
        return f"<{kind}>"

    return _ByType(
        tag,
        custom_error_type="unsupported",
        custom_error_message=_UNKNOWN_TYPE,
        custom_error_context={"at": ".type", "kinds": ", ".join(kinds) + (note and f"; {note}")},
    )


def of_type(kind: str, default: str = "", note: str = "") -> BeforeValidator:
    """Check an object's `type` where only one is allowed. `note`: what the refusal adds."""
    kinds = kind + (note and f"; {note}")

    def check(value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("type", default) not in (kind, None):  # no set: it may be a list
            raise PydanticCustomError("unsupported", _UNKNOWN_TYPE, {"at": ".type", "kinds": kinds})
        return value

    return BeforeValidator(check)


def _stops(value: JsonValue) -> list[str]:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid(f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    if not all(0 < len(str(stop)) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"must have strings of 1 to {MAX_STOP_CHARS} characters")
    return [str(stop) for stop in stops]


def _bias(value: JsonValue) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"has {len(value)} token ids, at most {MAX_LOGIT_BIAS} are allowed")
    return {_token_id(token): _bias_of(token, bias) for token, bias in value.items()}


def _token_id(key: str) -> int:
    digits = key.isascii() and key.isdigit() and len(key) <= len(str(INT32_MAX))
    if not digits or str(int(key)) != key or int(key) > INT32_MAX:  # "7" and "07" would be the same token
        raise invalid(f"must have token ids for keys, not {key[:32]!r}")
    return int(key)


def _bias_of(token: str, bias: JsonValue) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise invalid(f"must be a number from -{MAX_BIAS} to {MAX_BIAS}", at=f".{token}")
    return float(bias)


LogitBias = Annotated[dict[int, float] | None, PlainValidator(_bias, json_schema_input_type=dict[str, float] | None)]
Stops = Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str] | None)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]  # lower is served first


class AskedConstraint(NamedTuple):
    """An answer's form, and the field that requests it, for errors."""

    constraint: Constraint
    param: str


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[JsonValue, only(False)] = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk


class GenerationFields(Strict):
    """Fields of all endpoints that generate. Null means the default, as in OpenAI's API."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Stops = []
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias = None
    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1 and 0: all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Priority | None = None
    # keys for session affinity; the first one that is set is used
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    skip_special_tokens: bool | None = None  # true by default
    spaces_between_special_tokens: bool | None = None  # no effect with fast tokenizers, as in vLLM
    include_stop_str_in_output: bool | None = None  # also the text of the token that ends the answer
    add_special_tokens: bool | None = None  # default: true for a text, false for a conversation
    echo: bool | None = None  # with `continue_final_message`: return the continued turn, too
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # alternatives per token

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether each chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def announces_usage(self) -> bool:
        """Return whether chunks have a null usage because the last one has the numbers."""
        return self.include_usage and not self.continuous_usage

    @property
    def continues(self) -> bool:
        return False

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return None

    @property
    def echo_alternatives(self) -> int | None:
        """Alternatives per prompt token, if the answer includes the prompt."""
        return None

    @property
    def prompt_alternatives(self) -> int | None:
        """Alternatives that the model computes per prompt token."""
        asked = [count for count in (self.prompt_logprobs, self.echo_alternatives) if count is not None]
        return max(asked, default=None)

    @property
    def asked_constraint(self) -> AskedConstraint | None:
        return None

    def check(self) -> None:
        """Raises: Rejected if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise Rejected("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise Rejected("'prompt_logprobs' is not supported when 'stream' is true.", param="prompt_logprobs")


T = TypeVar("T")
# in the answer only if requested, as in vLLM
IfAsked = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


class Usage(BaseModel):
    """Tokens of one request, over all its choices."""

    class PromptDetails(BaseModel):
        """Prompt tokens found in the prefix cache."""

        cached_tokens: int

    class CompletionDetails(BaseModel):
        """Tokens of reasoning; for a request with a prediction, guessed tokens that were right, and wrong."""

        reasoning_tokens: int
        accepted_prediction_tokens: IfAsked[int] = None
        rejected_prediction_tokens: IfAsked[int] = None

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(
        cls, prompt: int, completion: int, cached: int, reasoning: int, drafts: DraftCounts | None = None
    ) -> "Usage":
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=cls.PromptDetails(cached_tokens=cached),
            completion_tokens_details=cls.CompletionDetails(
                reasoning_tokens=reasoning,
                accepted_prediction_tokens=None if drafts is None else drafts.accepted,
                rejected_prediction_tokens=None if drafts is None else drafts.checked - drafts.accepted,
            ),
        )


FinishReason = Literal["stop", "length", "tool_calls"]


def parse_body(cls: type[R], body: bytes) -> R:
    """Raises: Rejected, with the first error and its parameter."""
    return parse_value(cls, _read_json(body))


def parse_value(cls: type[R], value: Any) -> R:
    try:
        request = cls.model_validate(value)
    except ValidationError as exc:
        raise _rejection(exc.errors(include_url=False, include_input=False)[0], value) from None
    if isinstance(request, GenerationFields):
        request.check()
    return request


def _read_json(body: bytes) -> Any:
    """Refuse duplicate keys, because a proxy's parser may use the other value.

    NaN and numbers beyond a float pass: their fields refuse them by name.
    """
    check_text(body)
    try:
        value = jiter.from_json(body, catch_duplicate_keys=True)
    except ValueError as exc:
        raise Rejected(
            f"The request body is not valid JSON: {str(exc)[:MAX_ERROR_CHARS]}.", code="invalid_json"
        ) from None
    check_value(body, value)
    return value


def _rejection(fault: ErrorDetails, body: Any) -> Rejected:
    kind, reason = fault["type"], fault["msg"]
    code = CODES.get(kind, "invalid_value")
    param = _path(fault["loc"], body, missing=kind == "missing") + str(fault.get("ctx", {}).get("at", ""))
    if not param:
        return Rejected("The request body must be a JSON object.", code=code)
    shown = param if len(param) <= 128 else f"{param[:128]}…"
    if kind == "extra_forbidden":
        return Rejected(f"Unknown parameter: '{shown}'.", param=shown, code=code)
    if kind == "missing":
        return Rejected(f"Missing required parameter: '{shown}'.", param=shown, code=code)
    if kind in {"unsupported", "value_error"}:  # our own messages, which follow the parameter's name
        return Rejected(f"'{shown}' {reason}.", param=shown, code=code)
    reason = SHAPES.get(kind, reason.replace(" after validation", ""))
    return Rejected(f"Invalid '{shown}': {reason}.", param=shown, code=code)


def _path(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """A path such as `messages[0].content`. Steps of `loc` that are not in `body` are type names, and are left out."""
    steps, place = [], body
    for step in loc[:-1] if missing else loc:
        if step in place if isinstance(place, Mapping) else isinstance(place, list) and step in range(len(place)):
            steps.append(step)
            place = place[step]
    if missing:
        steps.append(loc[-1])
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
