"""`/v1/responses`: request and answer. A request is converted to a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, JsonValue

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.fields import (
    INT32_MAX,
    MAX_LOGPROBS,
    Strict,
    TokenCount,
    Usage,
    by_type,
    only,
    parse_value,
    tagged,
)
from components.openai.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Id,
    InputItem,
    InputItems,
    OutputItem,
    turns,
)
from components.openai.response_tools import (
    Callee,
    Search,
    ToolChoice,
    ToolMode,
    Tools,
    callees,
    chats_choice,
    chats_tools,
    moved_params,
)

LOGPROBS: Final = "message.output_text.logprobs"
# Clients include encrypted reasoning to send it back. Here items of reasoning have its text, and are accepted back. The others
# are parts of items that this server never returns.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
PARAMS: Final = {  # a chat's parameters to their names here
    r"messages.*": "input",
    r"max_tokens|max_completion_tokens": "max_output_tokens",
    r"response_format(?:\.json_schema)?(.*)": r"text.format\1",
    r"reasoning_effort": "reasoning.effort",
    r"logprobs": "include",
    r"(tools\[\d+\]|tool_choice)\.function\.(.+)": r"\1.\2",
}


class PlainText(Strict):
    type: Literal["text"] = "text"


class JsonObject(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    type: Literal["json_schema"]
    name: Id
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: (
        Annotated[
            Annotated[PlainText, tagged("text")]
            | Annotated[JsonObject, tagged("json_object")]
            | Annotated[JsonSchema, tagged("json_schema")],
            by_type("text", "json_object", "json_schema"),
        ]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint without effect


class ReasoningOptions(Strict):
    """Reasoning is returned in full; there are no summaries."""

    effort: JsonValue = None  # checked by the chat
    summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # ignored: the template decides
    generate_summary: Annotated[JsonValue, only()] = None


class StreamOptions(Strict):
    include_obfuscation: Annotated[JsonValue, only(False)] = None


class ResponsePrompt(Strict):
    """The fields of a response from which its prompt is made."""

    input: InputItems
    instructions: str | None = None
    previous_response_id: Id | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    # not supported yet
    truncation: Annotated[JsonValue, only("disabled")] = None
    conversation: Annotated[JsonValue, only()] = None

    @property
    def params(self) -> dict[str, str]:
        """Patterns of a chat's parameters with their names in this request."""
        return moved_params(self.tools or ()) | PARAMS

    def callees(self) -> dict[str, Callee]:
        return callees(self.tools or ())

    def chat_with(
        self, model: str, earlier: Sequence[InputItem], items: Sequence[InputItem], **fields: Any
    ) -> ChatRequest:
        """A chat that continues `earlier`. Raises: Rejected, with the chat's parameter names.

        `items`: the input, with items in the place of references.
        """
        _check_outputs(earlier, items)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        wanted: dict[str, Any] = {
            "model": model,
            "messages": [*system, *turns([*earlier, *items])],
            "response_format": self._response_format(),
            "tools": chats_tools(self.tools or ()) or None,
            "tool_choice": None if self.tool_choice is None else chats_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            **fields,
        }
        return parse_value(ChatRequest, {name: value for name, value in wanted.items() if value is not None})

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, JsonSchema):
            schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
            return {"type": "json_schema", "json_schema": schema}
        return None if form is None else form.model_dump()


class InputTokensRequest(ResponsePrompt):
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesRequest(ResponsePrompt):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None  # of hosted tools; there are none
    client_metadata: dict[str, JsonValue] | None = None  # Codex's; ignored
    # not supported yet
    service_tier: Annotated[JsonValue, only("auto", "default", "flex", "priority")] = None  # served alike
    prompt: Annotated[JsonValue, only()] = None
    prompt_cache_retention: Annotated[JsonValue, only("in_memory")] = None

    @property
    def stored(self) -> bool:
        return bool(self.store or self.background)

    @property
    def _has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise Rejected("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.top_logprobs is not None and not self._has_logprobs:
            raise Rejected(
                "'top_logprobs' is only allowed when 'include' has 'message.output_text.logprobs'.",
                param="top_logprobs",
            )
        if self.background and self.store is False:
            raise Rejected("'background' requires 'store', because the answer is read from the store.", param="store")
        if self.background and self.stream:
            raise Rejected(
                "'stream' and 'background' cannot be combined.",
                param="stream",
                code="unsupported_parameter",
            )

    def chat(self, earlier: Sequence[InputItem], items: Sequence[InputItem]) -> ChatRequest:
        return self.chat_with(
            self.model,
            earlier,
            items,
            stream=self.stream,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self._has_logprobs or None,
            top_logprobs=self.top_logprobs,
            user=self.user,
            prompt_cache_key=self.prompt_cache_key,
        )


def _check_outputs(earlier: Sequence[InputItem], items: Sequence[InputItem]) -> None:
    """Raises: Rejected, if an output belongs to no earlier call, or to one that already has an output."""
    calls: set[str] = set()
    for i, item in enumerate([*earlier, *items], -len(earlier)):
        if isinstance(item, CallItem | CustomCallItem):
            calls.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in calls:
            at = f"input[{max(i, 0)}].call_id"
            why = f"no '{item.type.removesuffix('_output')}' before it has this id and no output yet"
            raise Rejected(f"Invalid '{at}': {why}.", param=at, code="invalid_value")
        elif isinstance(item, CallOutputItem):
            calls.remove(item.call_id)


class ResponsesUsage(BaseModel):
    class InputDetails(BaseModel):
        """Input tokens found in the prefix cache."""

        cached_tokens: int
        cache_write_tokens: int = 0  # caching is free

    class OutputDetails(BaseModel):
        """Output tokens of reasoning."""

        reasoning_tokens: int

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponsesUsage":
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=cls.InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=cls.OutputDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    """A response, complete or in progress, with the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None

    @classmethod
    def begun(
        cls, response_id: str, created: int, request: ResponsesRequest, *, store: bool, temperature: float, top_p: float
    ) -> "ResponseObject":
        """The answer before any output. Sampling parameters include defaults."""
        choice = request.tool_choice
        return cls(
            id=response_id,
            created_at=created,
            status="in_progress",
            background=bool(request.background),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            model=request.model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning={"effort": request.reasoning and request.reasoning.effort, "summary": None},
            safety_identifier=request.safety_identifier,
            store=store,
            temperature=temperature,
            text=_echoed_text(request.text),
            tool_choice="auto"
            if choice is None
            else choice.type
            if isinstance(choice, ToolMode)
            else choice.model_dump(exclude_none=True),
            tools=[tool.model_dump() for tool in request.tools or () if not isinstance(tool, Search)],
            top_logprobs=request.top_logprobs or 0,
            top_p=top_p,
            user=request.user,
        )


def _echoed_text(options: TextOptions | None) -> dict[str, Any]:
    form = (options and options.format) or PlainText()
    return {"format": form.model_dump(by_alias=True), "verbosity": "medium"}
