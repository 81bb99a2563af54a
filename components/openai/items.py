"""Items of a conversation in the Responses API, and their conversion to chat messages."""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, model_validator

from components.openai.fields import IfAsked, Strict, by_type, only, tagged
from components.openai.tools import without_media

MAX_ITEMS: Final = 4096
MAX_PARTS: Final = 1024

Id = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


def called(name: str, namespace: str | None) -> str:
    """The name that the model calls a tool by."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class Item(Strict):
    """Part of a conversation. Ignores unknown fields that are null, because clients send back every field that they know."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {name: field for name, field in value.items() if field is not None or name in cls.model_fields}


class InputText(Item):
    type: Literal["input_text"] = "input_text"
    text: str


class OutputText(Item):
    """Text from the model that a client sends back."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[JsonValue, only([])] = None
    logprobs: Annotated[list[JsonValue] | None, Field(exclude=True)] = None  # from the answer; not stored again


class Refusal(Item):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[InputText, tagged("input_text")]
    | Annotated[OutputText, tagged("output_text")]
    | Annotated[Refusal, tagged("refusal")],
    by_type("input_text", "output_text", "refusal", note="images, audio and files are not supported"),
]


def _parts(value: JsonValue) -> JsonValue:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[Part],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=str | list[Part]),
]


ResultParts = Annotated[
    list[Annotated[Part, BeforeValidator(partial(without_media, text_type="input_text"))]],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=str | list[Part]),
]


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # set by the model


class CallItem(Item):
    """A function call by the model."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: str
    namespace: Id | None = None
    id: Id | None = None
    status: Status | None = None

    @property
    def function(self) -> dict[str, str]:
        """The call as the model makes it."""
        return {"name": called(self.name, self.namespace), "arguments": self.arguments}


class CustomCallItem(Item):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: Id
    input: str
    namespace: Id | None = None
    id: Id | None = None
    status: Status | None = None

    @property
    def function(self) -> dict[str, str]:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return {"name": called(self.name, self.namespace), "arguments": arguments}


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: ResultParts
    id: Id | None = None
    status: Status | None = None


class SummaryText(Item):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Item):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The model's reasoning before an answer."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    encrypted_content: Annotated[str | None, Field(exclude=True)] = None  # another server's, which has the key
    status: Status | None = None

    @property
    def texts(self) -> list[str]:
        """The reasoning, or its summary if it is not readable."""
        return [part.text for part in self.content or self.summary or ()]


class ItemReference(Item):
    """An output item of a stored response."""

    type: Literal["item_reference"]
    id: Id


InputItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem
RequestItem = Annotated[
    Annotated[MessageItem, tagged("message")]
    | Annotated[CallItem, tagged("function_call")]
    | Annotated[CallOutputItem, tagged("function_call_output")]
    | Annotated[CustomCallItem, tagged("custom_tool_call")]
    | Annotated[CallOutputItem, tagged("custom_tool_call_output")]
    | Annotated[ReasoningItem, tagged("reasoning")]
    | Annotated[ItemReference, tagged("item_reference")],
    by_type(
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
        default="message",
        note="tools are accepted in 'tools' alone",
    ),
]


def _items(value: JsonValue) -> JsonValue:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


InputItems = Annotated[
    list[RequestItem],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | list[RequestItem]),
]


def turns(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls between two user messages become one turn.

    An output follows its call's turn, also if messages came between them.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, CallOutputItem):
            output = {"role": "tool", "tool_call_id": item.call_id, "content": _texts(item.output)}
            messages.insert(_place_of(item.call_id, messages), output)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _texts(item.content)})
        elif not isinstance(item, ReasoningItem) or item.texts:
            _add(_assistants_turn(messages), item)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return messages


def _place_of(call_id: str, messages: Sequence[dict[str, Any]]) -> int:
    """Where an output belongs: behind the last turn with this call, and behind that turn's other outputs."""
    calling = (
        i
        for i in reversed(range(len(messages)))
        if any(call["id"] == call_id for call in messages[i].get("tool_calls", ()))
    )
    place = next(calling) + 1
    while place < len(messages) and messages[place]["role"] == "tool":
        place += 1
    return place


def _assistants_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add(turn: dict[str, Any], item: MessageItem | CallItem | CustomCallItem | ReasoningItem) -> None:
    """`reasoning_content` is a list until all items are added."""
    if isinstance(item, MessageItem):
        turn["content"] = turn["content"] or []
        turn["content"] += _texts(item.content)
    elif isinstance(item, ReasoningItem):
        turn.setdefault("reasoning_content", []).extend(item.texts)
    else:
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": item.function})


def _texts(parts: Sequence[InputText | OutputText | Refusal]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part.text} for part in parts]


class OutputPart(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[Any] = []


class OutputThought(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputPart]


class OutputCall(BaseModel):
    """A function call, for the client to run."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: Status
    call_id: str
    name: str
    namespace: IfAsked[str] = None
    arguments: str


class OutputCustomCall(BaseModel):
    """A call of a custom tool, for the client to run."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    status: Status
    call_id: str
    name: str
    namespace: IfAsked[str] = None
    input: str


class OutputReasoning(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[None] = []
    content: list[OutputThought]


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning
