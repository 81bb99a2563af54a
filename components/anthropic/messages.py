"""`/v1/messages`: request and answer. A request is converted to a chat."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.fields import (
    INT32_MAX,
    IfAsked,
    Strict,
    TokenCount,
    Usage,
    by_type,
    of_type,
    only,
    parse_value,
    tagged,
)
from components.openai.tools import without_media

MAX_MESSAGES: Final = 4096
MAX_BLOCKS: Final = 1024
MAX_TOOLS: Final = 1024
PARAMS: Final = {  # pattern of a chat's parameter: its name in this API, if different
    r"max_completion_tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"response_format.*": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters(.*)": r"\1.input_schema\2",
    r"(tools\[\d+\]|tool_choice)\.function\.(.+)": r"\1.\2",
    r"reasoning_effort": "thinking",
    r"parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

NO_MEDIA: Final = "images and documents are not supported"
NO_SERVER_TOOLS: Final = "this server runs no tools itself"
NO_THREADS: Final = "thread_unsupported_request"  # clients then send the conversation again without thread

Id = Annotated[str, Field(max_length=256)]


class CacheControl(Strict):
    """Accepted and ignored: every prefix is cached, without a promised lifetime."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"] = "text"
    text: str
    citations: Annotated[JsonValue, only([])] = None


def _texts(value: JsonValue) -> JsonValue:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    list[Annotated[TextBlock, of_type("text", note=NO_MEDIA)]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_texts, json_schema_input_type=str | list[TextBlock]),
]


ResultBlocks = Annotated[
    list[Annotated[TextBlock, of_type("text"), BeforeValidator(without_media)]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_texts, json_schema_input_type=str | list[TextBlock]),
]


class ToolUse(Cacheable):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, JsonValue]
    caller: Annotated[JsonValue, only({"type": "direct"})] = None
    toolset_name: Annotated[JsonValue, only()] = None


class ToolResult(Cacheable):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: ResultBlocks | None = None
    is_error: bool | None = None


class Thinking(Strict):
    """Reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Strict):
    """Reasoning of another server, which has the key. The model does not see it."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[TextBlock, tagged("text")]
    | Annotated[ToolUse, tagged("tool_use")]
    | Annotated[ToolResult, tagged("tool_result")]
    | Annotated[Thinking, tagged("thinking")]
    | Annotated[RedactedThinking, tagged("redacted_thinking")],
    by_type("text", "tool_use", "tool_result", "thinking", "redacted_thinking", note=NO_MEDIA),
]


def _blocks(value: JsonValue) -> JsonValue:
    """A turn's blocks. Claude Code sends a PDF that a tool reads beside the result: media there become texts, too."""
    if not isinstance(value, list) or not any(isinstance(x, dict) and x.get("type") == "tool_result" for x in value):
        return _texts(value)
    return [without_media(block) for block in value]


Blocks = Annotated[
    list[Block],
    Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_blocks, json_schema_input_type=str | list[Block]),
]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(Cacheable):
    type: Literal["custom"] | None = None
    name: Id
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # always the case
    input_examples: Annotated[JsonValue, only([])] = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Id | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Strict):
    """Whether the model reasons first, if that can be set. Only `max_tokens` limits the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024, le=INT32_MAX)] | None = None
    display: Annotated[JsonValue, only("summarized", "omitted")] = None  # ignored: reasoning is returned in full


class JsonFormat(Strict):
    """A JSON schema that the answer must satisfy."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Strict):
    effort: JsonValue = None  # checked by the chat
    format: JsonFormat | None = None


class ContextManagement(Strict):
    """Accepted and ignored: the answer reports that no edit was applied. Each type of edit has fields of its own."""

    edits: Annotated[list[dict[str, JsonValue]], Field(max_length=16)] | None = None


class RequestMetadata(Strict):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountRequest(Strict):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[Tool, of_type("custom", default="custom", note=NO_SERVER_TOOLS)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    # not honoured yet
    speed: Annotated[JsonValue, only("standard")] = None

    @property
    def params(self) -> dict[str, str]:
        """Patterns of a chat's parameters with their names in this API."""
        by_effort = self.output_config is not None and self.output_config.effort is not None
        return PARAMS | {"reasoning_effort": "output_config.effort"} if by_effort else PARAMS

    def chat(self) -> ChatRequest:
        """Raises: Rejected, with the chat's parameter names."""
        wanted = {name: value for name, value in self._wanted().items() if value is not None}
        return parse_value(ChatRequest, wanted)

    def check(self) -> None:
        """Raises: Rejected, if fields contradict each other."""
        _check_blocks(self.messages)
        choice = self.tool_choice
        if choice is not None and (choice.name is None) == (choice.type == "tool"):
            raise Rejected(
                "'tool_choice.name' is required with type 'tool', and not allowed with another type.",
                param="tool_choice.name",
            )
        self._check_thinking()

    def _check_thinking(self) -> None:
        if self.thinking is not None and (self.thinking.budget_tokens is None) == (self.thinking.type == "enabled"):
            raise Rejected(
                "'thinking.budget_tokens' is required with type 'enabled', and not allowed with another type.",
                param="thinking.budget_tokens",
            )

    def _wanted(self) -> dict[str, Any]:
        choice, config = self.tool_choice, self.output_config
        answer = None if config is None or config.format is None else config.format.schema_
        return {
            "model": self.model,
            "messages": turns(self.system or (), self.messages),
            "tools": [_chats_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else _chats_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "reasoning_effort": self._effort(),
            "response_format": None if answer is None else _chats_format(answer),
        }

    def _effort(self) -> JsonValue:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = None if self.output_config is None else self.output_config.effort
        return effort or ("medium" if self.thinking is not None else None)


class MessagesRequest(CountRequest):
    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    metadata: RequestMetadata | None = None
    # not honoured yet
    service_tier: Annotated[JsonValue, only("auto", "standard_only")] = None
    container: Annotated[JsonValue, only()] = None
    inference_geo: Annotated[JsonValue, only()] = None
    diagnostics: Annotated[JsonValue, only()] = None
    thread: JsonValue = None

    def check(self) -> None:
        if self.thread is not None:
            raise Rejected(
                "'thread' is not supported: send the whole conversation without it.", param="thread", code=NO_THREADS
            )
        if self.messages[-1].role == "assistant":
            raise Rejected(
                "'messages' ends with the assistant's turn, which this server cannot continue: end with the user's.",
                param="messages",
                code="unsupported_parameter",
            )
        super().check()

    def _check_thinking(self) -> None:
        super()._check_thinking()
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise Rejected("'thinking.budget_tokens' must be less than 'max_tokens'.", param="thinking.budget_tokens")

    def _wanted(self) -> dict[str, Any]:
        own = {
            "max_completion_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": None if self.metadata is None else self.metadata.user_id,
        }
        return super()._wanted() | own


def _check_blocks(messages: Sequence[Turn]) -> None:
    """Raises: Rejected, if a block is in the wrong turn, or a result belongs to no call."""
    uses: set[str] = set()  # ids of the previous turn
    made: set[str] = set()  # ids of this turn
    only_results = True  # this turn has only results so far
    for i, message in enumerate(messages):
        if i and message.role != messages[i - 1].role:  # consecutive messages of a role are one turn
            uses, made, only_results = made, set(), True
        made |= {block.id for block in message.content if isinstance(block, ToolUse)}
        for j, block in enumerate(message.content):
            at = f"messages[{i}].content[{j}]"
            if isinstance(block, TextBlock):
                only_results = False
            elif isinstance(block, ToolResult) != (message.role == "user") or message.role == "system":
                raise _wrong(f"{at}.type", f"'{block.type}' is not allowed in a turn of the {message.role}")
            elif isinstance(block, ToolResult) and not only_results:
                raise _wrong(at, "a 'tool_result' must come before any text of its turn")
            elif isinstance(block, ToolResult) and block.tool_use_id not in uses:
                raise _wrong(f"{at}.tool_use_id", "no 'tool_use' in the previous turn has this id")


def _wrong(param: str, why: str) -> Rejected:
    return Rejected(f"Invalid '{param}': {why}.", param=param, code="invalid_value")


def turns(system: Sequence[TextBlock], messages: Iterable[Turn]) -> list[dict[str, Any]]:
    """A chat's messages. Consecutive turns of a role are joined. Each tool result becomes a message."""
    made: list[dict[str, Any]] = []
    if system:
        made.append({"role": "system", "content": [_chats_text(block.text) for block in system]})
    for message in messages:
        for block in message.content:
            if isinstance(block, ToolResult):
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
            elif not isinstance(block, RedactedThinking):
                if not made or made[-1]["role"] != message.role:
                    made.append({"role": message.role, "content": None})
                _add(made[-1], block)
    for turn in made:
        if "reasoning_content" in turn:
            turn["reasoning_content"] = "".join(turn["reasoning_content"])
    return made


def _add(turn: dict[str, Any], block: TextBlock | ToolUse | Thinking) -> None:
    """`reasoning_content` is a list until `turns` joins it."""
    if isinstance(block, TextBlock):
        turn["content"] = turn["content"] or []
        turn["content"].append(_chats_text(block.text))
    elif isinstance(block, Thinking):
        turn.setdefault("reasoning_content", []).append(block.thinking)
    else:
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})


def _result(block: ToolResult) -> list[dict[str, str]]:
    """A result as text. An error starts with "Error:", because a chat has no field for that."""
    texts = [part.text for part in block.content or ()]
    return [_chats_text(text) for text in (["Error:", *texts] if block.is_error else texts or [""])]


def _chats_text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _chats_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chats_format(schema: dict[str, JsonValue]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _chats_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(BaseModel):
    """Tokens of one message. `input_tokens` excludes those found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # caching is free
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class AppliedEdits(BaseModel):
    applied_edits: list[None] = []


class MessageObject(BaseModel):
    """An answer, complete or before its first block."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = []  # text, tool_use and thinking blocks
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: IfAsked[AppliedEdits] = None


class TokenCountAnswer(BaseModel):
    input_tokens: int
