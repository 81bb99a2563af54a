"""`/v1/messages`: request and answer. A request is written as a chat, and is one from there on."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.fields import INT32_MAX, Strict, TokenCount, Usage, by_type, of_type, only, parse_value, tagged

MAX_MESSAGES: Final = 4096
MAX_BLOCKS: Final = 1024
MAX_TOOLS: Final = 1024
PARAMS: Final = {  # a chat's name, as a pattern, and ours; those that are the same are not here
    r"max_completion_tokens": "max_tokens",
    r"stop": "stop_sequences",
    r"response_format.*": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters(.*)": r"\1.input_schema\2",
    r"(tools\[\d+\]|tool_choice)\.function\.(.+)": r"\1.\2",
    r"reasoning_effort": "thinking",
    r"parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}

Id = Annotated[str, Field(max_length=256)]


class CacheControl(Strict):
    """What begins like this is cached, here as everywhere else: the prefix cache needs no telling, and promises no time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Strict):
    """May ask for it."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    """Text."""

    type: Literal["text"] = "text"
    text: str
    citations: Annotated[JsonValue, only([])] = None


def _texts(value: JsonValue) -> JsonValue:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    list[Annotated[TextBlock, of_type("text")]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_texts, json_schema_input_type=str | list[TextBlock]),
]


class ToolUse(Cacheable):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, JsonValue]
    caller: Annotated[JsonValue, only({"type": "direct"})] = None


class ToolResult(Cacheable):
    """What that gave."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: TextBlocks | None = None
    is_error: bool | None = None


class Thinking(Strict):
    """What the model thought, as it comes back from a client. The signature is nobody's: nothing hangs on it here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    Annotated[TextBlock, tagged("text")]
    | Annotated[ToolUse, tagged("tool_use")]
    | Annotated[ToolResult, tagged("tool_result")]
    | Annotated[Thinking, tagged("thinking")],
    by_type("text", "tool_use", "tool_result", "thinking"),
]
Blocks = Annotated[
    list[Block],
    Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True),
    BeforeValidator(_texts, json_schema_input_type=str | list[Block]),
]


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(Cacheable):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    name: Id
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come
    input_examples: Annotated[JsonValue, only([])] = None


class ToolChoice(Strict):
    """Whether the model may call tools, must, or must call this one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Id | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Strict):
    """Whether the model thinks first. What it may spend on that is bounded by `max_tokens` alone."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024, le=INT32_MAX)] | None = None
    display: Annotated[JsonValue, only("summarized")] = None


class JsonFormat(Strict):
    """The answer is what the schema describes."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Strict):
    """How the answer is to be."""

    effort: JsonValue = None  # a chat knows which
    format: JsonFormat | None = None


class RequestMetadata(Strict):
    """Who asks."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountRequest(Strict):
    """The body of a request to count tokens."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[Tool, of_type("custom", default="custom")]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    # not honoured yet
    speed: Annotated[JsonValue, only("standard")] = None

    @property
    def params(self) -> dict[str, str]:
        """Patterns of a chat's parameters, and what this request calls them."""
        by_effort = self.output_config is not None and self.output_config.effort is not None
        return PARAMS | {"reasoning_effort": "output_config.effort"} if by_effort else PARAMS

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises: Rejected, in a chat's words."""
        return parse_value(ChatRequest, {name: value for name, value in self._wanted().items() if value is not None})

    def check(self) -> None:
        """Raises: Rejected, when fields contradict each other."""
        if self.messages[-1].role == "assistant":
            raise Rejected(
                "'messages' ends with the assistant's turn, which this server cannot go on with: end with the user's.",
                param="messages",
                code="unsupported_parameter",
            )
        _check_blocks(self.messages)
        choice = self.tool_choice
        if choice is not None and (choice.name is None) == (choice.type == "tool"):
            raise Rejected("'tool_choice.name' belongs to the type 'tool', and to no other.", param="tool_choice.name")
        self._check_thinking()

    def _check_thinking(self) -> None:
        if self.thinking is not None and (self.thinking.budget_tokens is None) == (self.thinking.type == "enabled"):
            raise Rejected(
                "'thinking.budget_tokens' belongs to the type 'enabled', and to no other.",
                param="thinking.budget_tokens",
            )

    def _wanted(self) -> dict[str, Any]:
        choice, config = self.tool_choice, self.output_config
        schema = config and config.format and config.format.schema_
        return {
            "model": self.model,
            "messages": turns(self.system or (), self.messages),
            "tools": [_chats_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": choice and _chats_choice(choice),
            "parallel_tool_calls": choice and choice.disable_parallel_tool_use and False,
            "reasoning_effort": self._effort(),
            "response_format": schema and {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }

    def _effort(self) -> JsonValue:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = self.output_config and self.output_config.effort
        return effort or ("medium" if self.thinking is not None else None)


class MessagesRequest(CountRequest):
    """The body of a request."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    metadata: RequestMetadata | None = None
    # not honoured yet
    service_tier: Annotated[JsonValue, only("auto", "standard_only")] = None
    container: Annotated[JsonValue, only()] = None
    inference_geo: Annotated[JsonValue, only()] = None
    diagnostics: Annotated[JsonValue, only()] = None

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
            "user": self.metadata and self.metadata.user_id,
        }
        return super()._wanted() | own


def _check_blocks(messages: Sequence[Turn]) -> None:
    """Raises: Rejected, when a block is in a turn where it cannot be, or tells of what no tool was asked for."""
    uses: set[str] = set()  # of the turn before
    for i, message in enumerate(messages):
        new = {block.id for block in message.content if isinstance(block, ToolUse)}
        only_results = True  # so far
        for j, block in enumerate(message.content):
            at = f"messages[{i}].content[{j}]"
            if isinstance(block, TextBlock):
                only_results = False
            elif isinstance(block, ToolResult) != (message.role == "user") or message.role == "system":
                raise _wrong(f"{at}.type", f"there is no '{block.type}' in a turn of the {message.role}")
            elif isinstance(block, ToolResult) and not only_results:
                raise _wrong(at, "a 'tool_result' stands before any text of its turn")
            elif isinstance(block, ToolResult) and block.tool_use_id not in uses:
                raise _wrong(f"{at}.tool_use_id", "it is the id of no 'tool_use' in the turn before")
        uses = new


def _wrong(param: str, why: str) -> Rejected:
    return Rejected(f"Invalid '{param}': {why}.", param=param, code="invalid_value")


def turns(system: Sequence[TextBlock], messages: Iterable[Turn]) -> list[dict[str, Any]]:
    """The messages of a chat: one role's turns in a row are one, and what a tool gave is a message of its own."""
    made: list[dict[str, Any]] = []
    if system:
        made.append({"role": "system", "content": [_chats_text(block.text) for block in system]})
    for message in messages:
        for block in message.content:
            if isinstance(block, ToolResult):
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
            else:
                if not made or made[-1]["role"] != message.role:
                    made.append({"role": message.role, "content": None})
                _add(made[-1], block)
    for turn in made:
        if "reasoning_content" in turn:
            turn["reasoning_content"] = "".join(turn["reasoning_content"])
    return made


def _add(turn: dict[str, Any], block: TextBlock | ToolUse | Thinking) -> None:
    """Add to a turn of which `reasoning_content` is a list as long as it grows."""
    if isinstance(block, TextBlock):
        turn["content"] = turn["content"] or []
        turn["content"].append(_chats_text(block.text))
    elif isinstance(block, Thinking):
        turn.setdefault("reasoning_content", []).append(block.thinking)
    else:
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})


def _result(block: ToolResult) -> list[dict[str, str]]:
    """A chat has no mark for what went wrong, so it is said."""
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


def _chats_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(BaseModel):
    """Tokens of one message. Those of the prompt that were in the prefix cache are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # nothing is charged for it
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        """What a chat would have told."""
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class MessageObject(BaseModel):
    """An answer, whole or before its first block."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = []  # text, tool_use and thinking blocks
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCountAnswer(BaseModel):
    """How long a prompt would be."""

    input_tokens: int
