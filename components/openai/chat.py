"""`/v1/chat/completions`, and the conversation into which all dialects convert their requests."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, JsonValue, PlainValidator, ValidationInfo

from components.errors import Rejected
from components.openai.fields import (
    MAX_LOGPROBS,
    FinishReason,
    IfAsked,
    Strict,
    TokenCount,
    Usage,
    invalid,
    only,
)
from components.openai.logprobs import ChatLogprobs, PromptLogprobs
from components.openai.structured import ConstrainedFields
from components.openai.tools import MAX_CALLS, MAX_TOOLS, CalledTool, Tool, ToolChoice, ToolChoiceField, without_media
from components.output.calls import Call
from components.text.chat_template import Ending

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024  # of one message


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]  # in the form of chat templates
    tools: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice("auto")  # noqa: RUF009  # a tuple
    parallel: bool = True  # one answer may have several calls
    effort: Effort | None = None  # the nearest of the model's is used; None: its default
    variables: Mapping[str, JsonValue] = field(default_factory=dict)  # for the template, from the client
    ending: Ending = Ending()  # noqa: RUF009  # a tuple
    call_chars: int = 0  # of calls' arguments in `messages`

    @property
    def begun(self) -> str:
        """The text that the answer continues."""
        return str(self.messages[-1]["content"]) if self.ending.continue_last else ""


class TextPart(Strict):
    """Check and join text parts. Images, audio and files are refused, and the server fetches no URL."""

    type: Literal["text"]
    text: str


def _content(value: JsonValue, info: ValidationInfo) -> str | None:
    """Join parts by newlines, as in vLLM. A tool's result is read without images."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of text parts")
    if not value:
        raise invalid("must have at least one part")
    if len(value) > MAX_PARTS:
        raise invalid(f"has {len(value)} parts, at most {MAX_PARTS} are allowed")
    parts = map(without_media, value) if info.data.get("role") == "tool" else value
    return "\n".join(_part_text(part, i) for i, part in enumerate(parts))


def _predicted(value: JsonValue, info: ValidationInfo) -> str:
    text = _content(value, info)
    if text is None:
        raise invalid("must be a string or a list of text parts")
    return text


def _part_text(part: JsonValue, i: int) -> str:
    if not isinstance(part, dict):
        raise invalid("must be an object", at=f"[{i}]")
    if part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None)] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # of the call that this answers
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_CALLS)] | None = None
    refusal: str | None = None  # instead of content
    reasoning_content: str | None = None  # templates decide how much earlier reasoning the model sees
    reasoning: str | None = None  # another name for it
    # fields that clients send back with an answer
    annotations: Annotated[JsonValue, only([])] = None
    parsed: JsonValue = None  # added by the openai package's helpers
    audio: Annotated[JsonValue, only()] = None
    function_call: Annotated[JsonValue, only(instead="tool_calls")] = None

    @property
    def text(self) -> str:
        return self.content if self.content is not None else self.refusal or ""

    @property
    def is_empty(self) -> bool:
        if self.content is not None or self.tool_calls:
            return False
        return self.role != "assistant" or self.refusal is self.reasoning_content is self.reasoning is None

    def for_template(self) -> dict[str, Any]:
        """Chat templates have no developer role."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if thought is not None:
            turn["reasoning_content"] = thought
        return turn


def for_templates(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages for chat templates, with tools' results named and in the order of their calls.

    Some templates need a result's name, which clients omit. Many show no ids, and agents send results as they come.
    """
    made: list[dict[str, Any]] = []
    numbers = count()
    calls: dict[str, tuple[int, str]] = {}  # number and name by id
    for are_results, turns in groupby(map(Message.for_template, messages), lambda turn: turn["role"] == "tool"):
        if are_results:
            results = [{"name": calls[turn["tool_call_id"]][1], **turn} for turn in turns]
            made += sorted(results, key=lambda turn: calls[turn["tool_call_id"]][0])
            continue
        for turn in turns:
            made.append(turn)
            calls |= {call["id"]: (next(numbers), call["function"]["name"]) for call in turn.get("tool_calls", ())}
    return made


class Prediction(Strict):
    """Text that the answer may repeat, such as a file to be edited."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(_predicted, json_schema_input_type=str | list[TextPart])]


class ChatRequest(ConstrainedFields):
    # fail_fast: only the first fault is reported
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: TokenCount | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None  # default: true, unless the last message is continued
    continue_final_message: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prediction: Prediction | None = None
    # not supported yet
    store: Annotated[JsonValue, only(False)] = None
    service_tier: Annotated[JsonValue, only("auto", "default", "flex", "priority")] = None  # served alike
    prompt_cache_retention: Annotated[JsonValue, only("in_memory")] = None
    functions: Annotated[JsonValue, only([], instead="tools")] = None
    function_call: Annotated[JsonValue, only("none", "auto", instead="tool_choice")] = None
    modalities: Annotated[JsonValue, only(["text"])] = None
    audio: Annotated[JsonValue, only()] = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint without effect
    web_search_options: Annotated[JsonValue, only()] = None

    @property
    def token_limit(self) -> int | None:
        """Raises: Rejected if the two names contradict."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise Rejected(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_completion_tokens"
            )
        return old if new is None else new

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    def check(self) -> None:
        super().check()
        check_ending(self.messages, add=self.add_generation_prompt, continue_last=self.continue_final_message)
        if self.echo and not self.continue_final_message:
            raise Rejected("'echo' shows the message that 'continue_final_message' continues.", param="echo")
        if self.top_logprobs is not None and not self.logprobs:
            raise Rejected(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.", param="top_logprobs"
            )
        check_messages(self.messages)
        check_tools(self.tools or (), self.tool_choice)

    def conversation(self) -> Conversation:
        choice = self.tool_choice or ToolChoice("auto")
        return Conversation(
            for_templates(self.messages),
            () if choice.mode == "none" else [tool for tool in self.tools or () if choice.allows(tool.function.name)],
            choice,
            self.parallel_tool_calls is not False,
            self.reasoning_effort,
            self.chat_template_kwargs or {},
            ending_of(self.add_generation_prompt, self.continue_final_message, self.add_special_tokens),
            chars_of_calls(self.messages),
        )


def chars_of_calls(messages: Sequence[Message]) -> int:
    return sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())


def check_messages(messages: Sequence[Message]) -> None:
    """Raises: Rejected if a message is empty, or tool calls and results do not match."""
    calls: set[str] = set()  # ids that tool messages may answer
    answers = False  # tool messages may follow
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message.is_empty:
            code = "missing_required_parameter"
            raise Rejected(f"Missing required parameter: '{at}.content'.", param=f"{at}.content", code=code)
        if message.tool_calls and message.role != "assistant":
            raise Rejected(
                f"'{at}.tool_calls' is only allowed in messages of role 'assistant'.", param=f"{at}.tool_calls"
            )
        if message.role == "tool":
            _check_answer(message, at, calls if answers else set())
        else:
            answers = bool(message.tool_calls)
            calls.update(call.id for call in message.tool_calls or ())


def _check_answer(message: Message, at: str, calls: Set[str]) -> None:
    """Raises: Rejected if a tool message answers none of these calls."""
    if message.tool_call_id is None:
        code = "missing_required_parameter"
        raise Rejected(f"Missing required parameter: '{at}.tool_call_id'.", param=f"{at}.tool_call_id", code=code)
    if not calls:
        raise Rejected(
            f"'{at}.role' is 'tool', so the message must follow an assistant message with 'tool_calls'.",
            param=f"{at}.role",
            code="invalid_value",
        )
    if message.tool_call_id not in calls:
        raise Rejected(
            f"'{at}.tool_call_id' matches none of the preceding 'tool_calls'.",
            param=f"{at}.tool_call_id",
            code="invalid_value",
        )


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises: Rejected if two tools have the same name, or the choice names an unknown tool."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in names:
            raise Rejected(
                f"'tools[{i}].function.name' is already the name of another tool.",
                param=f"tools[{i}].function.name",
                code="invalid_value",
            )
        names.add(tool.function.name)
    if choice is None:
        return
    if (unknown := next((name for name in choice.allowed or () if name not in names), None)) is not None:
        raise Rejected(
            f"'tool_choice' allows '{unknown[:64]}', which is not in 'tools'.",
            param="tool_choice",
            code="invalid_value",
        )
    if choice.mode in {"none", "auto"}:
        return
    if not tools or choice.allowed == ():
        raise Rejected("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if choice.mode == "named" and choice.name not in names:
        shown = choice.name[:64]
        raise Rejected(
            f"'tool_choice' names '{shown}', which is not in 'tools'.", param="tool_choice", code="invalid_value"
        )


class CallMade(BaseModel):
    """A tool call by the model."""

    class Called(BaseModel):
        """A called function; its arguments are JSON text."""

        name: str
        arguments: str

    id: str
    type: Literal["function"] = "function"
    function: Called

    @classmethod
    def of(cls, call: Call) -> Self:
        return cls(id=call.id, function=cls.Called(name=call.name, arguments=call.arguments))


def ending_of(add: bool | None, continue_last: bool | None, special: bool | None) -> Ending:
    return Ending(not continue_last if add is None else add, bool(continue_last), bool(special))


def check_ending(messages: Sequence[Message], *, add: bool | None, continue_last: bool | None) -> None:
    """Raises: Rejected if the last message cannot be continued, or a new turn is also requested."""
    if add and continue_last:
        raise Rejected(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.", param="continue_final_message"
        )
    if continue_last and messages and messages[-1].tool_calls:  # calls come after the text, so that cannot be continued
        raise Rejected(
            "'continue_final_message' cannot continue a message that has 'tool_calls'.",
            param="continue_final_message",
            code="invalid_value",
        )


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: IfAsked[str] = None
    reasoning: IfAsked[str] = None
    tool_calls: IfAsked[list[CallMade]] = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: IfAsked[list[int]] = None


class ChatCompletion(BaseModel):
    """The answer to a chat request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_token_ids: IfAsked[list[int]] = None
    prompt_logprobs: IfAsked[PromptLogprobs] = None
