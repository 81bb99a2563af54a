"""Tools of a response: functions, custom tools and namespaces, all of which a chat's model calls as functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import from_json

from components.openai.fields import Strict, by_type, invalid, tagged
from components.openai.items import Id, called
from components.openai.tools import MAX_NAME

MAX_TOOLS: Final = 1024
SEARCHES: Final = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "tool_search",
)


class Callee(NamedTuple):
    """A tool as its client names it."""

    name: str
    namespace: str | None = None
    custom: bool = False


class FunctionTool(Strict):
    type: Literal["function"]
    name: Id
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # ignored: the model is offered each tool at once

    def as_function(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"type", "defer_loading"})


class TextFormat(Strict):
    type: Literal["text"]


class GrammarFormat(Strict):
    """The form of a custom tool's input. The model sees it. A required call is constrained to a regex.

    A Lark grammar does not constrain it: the input is within a JSON string, for which the compiler has no Lark.
    """

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Strict):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Id
    description: str | None = None
    defer_loading: bool | None = None  # as of functions
    format: (
        Annotated[
            Annotated[TextFormat, tagged("text")] | Annotated[GrammarFormat, tagged("grammar")],
            by_type("text", "grammar"),
        ]
        | None
    ) = None

    def as_function(self) -> dict[str, Any]:
        texts = [self.description] if self.description else []
        text = {"type": "string"}
        if isinstance(self.format, GrammarFormat):
            texts.append(f"The input must follow this {self.format.syntax} grammar:\n{self.format.definition}")
            if self.format.syntax == "regex":
                text["pattern"] = f"^(?:{self.format.definition})$"
        about = {"description": "\n\n".join(texts)} if texts else {}
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"name": self.name, "parameters": {**parameters, "additionalProperties": False}, **about}


class Namespace(Strict):
    """A group of tools with names of their own."""

    type: Literal["namespace"]
    name: Id
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, tagged("function")] | Annotated[CustomTool, tagged("custom")],
                by_type("function", "custom"),
            ]
        ],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


class Search(BaseModel):
    """A search in the web or for tools, which the model is not offered. Agents send it with every request."""

    model_config = ConfigDict(frozen=True)
    type: str


def _fits(tool: "FunctionTool | CustomTool | Namespace | Search") -> "FunctionTool | CustomTool | Namespace | Search":
    """Check the model's names of a namespace's tools."""
    for i, inner in enumerate(tool.tools if isinstance(tool, Namespace) else ()):
        if len(called(inner.name, tool.name if isinstance(tool, Namespace) else None)) > MAX_NAME:
            raise invalid(
                f"and its namespace's must have at most {MAX_NAME - 2} characters together", f".tools[{i}].name"
            )
    return tool


Tool = Annotated[
    Annotated[FunctionTool, tagged("function")]
    | Annotated[CustomTool, tagged("custom")]
    | Annotated[Namespace, tagged("namespace")]
    | Annotated[Search, tagged(SEARCHES[0])]
    | Annotated[Search, tagged(SEARCHES[1])]
    | Annotated[Search, tagged(SEARCHES[2])]
    | Annotated[Search, tagged(SEARCHES[3])]
    | Annotated[Search, tagged(SEARCHES[4])],
    by_type("function", "custom", "namespace", note="it runs no tools itself, and ignores searches"),
    AfterValidator(_fits),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(Strict):
    type: Literal["function", "custom"]
    name: Id
    namespace: Id | None = None


class ToolMode(Strict):
    type: Literal["none", "auto", "required"]


class AllowedTool(BaseModel):
    """A function or custom tool; others are ignored, because the model is not offered them."""

    model_config = ConfigDict(frozen=True, strict=True)
    type: str
    name: Id | None = None
    namespace: Id | None = None


class AllowedTools(Strict):
    """Only these of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _choice(value: JsonValue) -> JsonValue:
    return {"type": value} if isinstance(value, str) else value


ToolChoice = Annotated[
    Annotated[ToolMode, tagged("none")]
    | Annotated[ToolMode, tagged("auto")]
    | Annotated[ToolMode, tagged("required")]
    | Annotated[NamedTool, tagged("function")]
    | Annotated[NamedTool, tagged("custom")]
    | Annotated[AllowedTools, tagged("allowed_tools")],
    by_type("none", "auto", "required", "function", "custom", "allowed_tools"),
    BeforeValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools),
]


def _each(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, FunctionTool | CustomTool]]:
    """Each callable tool, with its place in the request and its namespace."""
    for i, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            for j, inner in enumerate(tool.tools):
                yield f"tools[{i}].tools[{j}]", tool.name, inner
        elif not isinstance(tool, Search):
            yield f"tools[{i}]", None, tool


def chats_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {**tool.as_function(), "name": called(tool.name, namespace)}}
        for _, namespace, tool in _each(tools)
    ]


def moved_params(tools: Sequence[Any]) -> dict[str, str]:
    """Patterns of a chat's tool parameters that have another place in the request, with that place."""
    return {
        rf"tools\[{i}\](?:\.function)?(.*)": rf"{place}\1"
        for i, (place, _, _) in enumerate(_each(tools))
        if place != f"tools[{i}]"
    }


def callees(tools: Sequence[Any]) -> dict[str, Callee]:
    """The tools by their names for the model."""
    return {
        called(tool.name, namespace): Callee(tool.name, namespace, isinstance(tool, CustomTool))
        for _, namespace, tool in _each(tools)
    }


def chats_choice(choice: ToolMode | NamedTool | AllowedTools) -> str | dict[str, Any]:
    if isinstance(choice, ToolMode):
        return choice.type
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": called(choice.name, choice.namespace)}}
    allowed = [
        {"type": "function", "function": {"name": called(tool.name or "", tool.namespace)}}
        for tool in choice.tools
        if tool.type in {"function", "custom"}
    ]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}


def input_of(arguments: str) -> str:
    """A custom tool's input, even if cut off, from the model's arguments."""
    try:
        read = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    found = read.get("input", "") if isinstance(read, Mapping) else None
    return found if isinstance(found, str) else arguments
