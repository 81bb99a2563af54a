"""`/v1/chat/completions`: request and answer."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, PlainValidator

from components.errors import Rejected
from components.openai.fields import (
    MAX_LOGPROBS,
    FinishReason,
    GenerationFields,
    Strict,
    TokenCount,
    Usage,
    invalid,
    only,
)
from components.openai.logprobs import ChatLogprobs


class TextPart(Strict):
    """A part of a message's content. Images, audio and files are refused; nothing is ever fetched."""

    type: Literal["text"]
    text: str


def _content(value: JsonValue) -> str:
    """A message's text; parts are joined by newlines, which is what users of vLLM get."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of text parts")
    if not value:
        raise invalid("must hold at least one part")
    return "\n".join(_part_text(part, i) for i, part in enumerate(value))


def _part_text(part: JsonValue, i: int) -> str:
    if not isinstance(part, dict):
        raise invalid("must be an object", at=f"[{i}]")
    if part.get("type") != "text":
        raise invalid("must be 'text': images, audio and files are not supported", at=f"[{i}].type")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid("must be a string", at=f"[{i}].text")
    unknown = next((key for key in part if key not in TextPart.model_fields), None)
    if unknown is not None:
        raise invalid("is not a field of a text part", at=f"[{i}].{unknown}")
    return text


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart])]
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    # clients send an answer back with every field it came with
    refusal: Annotated[JsonValue, only()] = None
    annotations: Annotated[JsonValue, only([])] = None
    audio: Annotated[JsonValue, only()] = None
    function_call: Annotated[JsonValue, only()] = None
    tool_calls: Annotated[JsonValue, only([])] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: they have no developer, whose words rank with the system's."""
        turn = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class ChatRequest(GenerationFields):
    """The body of a chat request."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    # not honoured yet
    store: Annotated[JsonValue, only(False)] = None
    service_tier: Annotated[JsonValue, only("auto", "default")] = None
    response_format: Annotated[JsonValue, only({"type": "text"})] = None
    tools: Annotated[JsonValue, only([])] = None
    tool_choice: Annotated[JsonValue, only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[JsonValue, only([])] = None
    function_call: Annotated[JsonValue, only("none", "auto")] = None
    modalities: Annotated[JsonValue, only(["text"])] = None
    audio: Annotated[JsonValue, only()] = None
    prediction: Annotated[JsonValue, only()] = None
    reasoning_effort: Annotated[JsonValue, only("none")] = None
    verbosity: Annotated[JsonValue, only("medium")] = None
    web_search_options: Annotated[JsonValue, only()] = None

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, under either of its names. Raises: Rejected, when they contradict."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise Rejected(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_completion_tokens"
            )
        return old if new is None else new

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to tell of with each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises: Rejected, when fields contradict each other."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise Rejected(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs"
            )


class ChatMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The answer to a chat request that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
