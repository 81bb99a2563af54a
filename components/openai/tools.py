"""Tools in a request: definitions, the choice, and calls and results of earlier turns."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field, JsonValue, PlainValidator, ValidationError
from pydantic_core import from_json

from components.openai.fields import Strict, invalid
from components.openai.json_size import fault_in_text

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 256  # of one message
TYPES: Final = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))

MEDIA: Final = {  # types of parts and blocks of all dialects, and what they are
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "file": "file",
    "input_file": "file",
    "document": "document",
}
MAX_NAME: Final = 64
Name = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}$")]


def _parameters(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Check a schema's outline; the compiler checks schemas that constrain the answer."""
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid("must describe an object", at=".type")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise invalid("must be an object of schemas", at=".properties")
    for name, inner in properties.items():
        _check_property(inner, f".properties.{name}")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise invalid("must be a list of strings", at=".required")
    return schema


def _check_property(schema: JsonValue, at: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid("must be a schema", at=at)
    kinds = schema.get("type", [])
    named = kinds if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) and kind in TYPES for kind in named):
        raise invalid("must be a JSON Schema type, or a list of types", at=f"{at}.type")


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, JsonValue], AfterValidator(_parameters)] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool without unset fields, but with parameters, which templates iterate."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


MODES: Final[tuple[Literal["none", "auto", "required"], ...]] = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """`name` is set only with "named"."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    allowed: tuple[str, ...] | None = None  # names of callable tools; None: all

    def allows(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


class _Named(Strict):
    class Function(Strict):
        """The name alone."""

        name: str

    type: Literal["function"]
    function: Function


class _Allowed(Strict):
    class Tools(Strict):
        """The tools, each by its name."""

        mode: Literal["auto", "required"]
        tools: Annotated[list[_Named], Field(max_length=MAX_TOOLS, fail_fast=True)]

    type: Literal["allowed_tools"]
    allowed_tools: Tools


def _choice(value: JsonValue) -> ToolChoice | None:
    if value is None:
        return None
    for mode in MODES:
        if value == mode:
            return ToolChoice(mode)
    kind = value.get("type") if isinstance(value, dict) else None
    try:
        if kind == "allowed_tools":
            allowed = _Allowed.model_validate(value).allowed_tools
            return ToolChoice(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))
        return ToolChoice("named", _Named.model_validate(value).function.name)
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_input=False)[0]
        if isinstance(kind, str) and kind in {"function", "allowed_tools"} and fault["type"] == "extra_forbidden":
            raise invalid(f"has a field that is not known, {str(fault['loc'][-1])[:64]!r}") from None
    raise invalid(
        "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or"
        " {'type': 'allowed_tools', 'allowed_tools': {'mode': …, 'tools': […]}}"
    )


def _arguments(text: str) -> str:
    """Check the size: a template gets the parsed arguments."""
    if (fault := fault_in_text(text.encode())) is not None:
        raise invalid(fault)
    return text


class CalledFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, AfterValidator(_arguments)]  # JSON as the model wrote it, maybe invalid
    parsed_arguments: JsonValue = None  # left by helpers of the openai package, which parse it


class CalledTool(Strict):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left by clients that join a call from a stream

    def for_template(self) -> dict[str, Any]:
        """Arguments become an object, or stay text if they are not one."""
        arguments: Any = self.function.arguments
        try:
            read = from_json(arguments or "{}")  # as for bodies: no lone surrogates, no deep nesting
        except ValueError:
            read = None
        if isinstance(read, dict):
            arguments = read
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def without_media(part: Any, text_type: str = "text") -> Any:
    """A part of a tool's result; a text replaces an image or file.

    The user did not choose to send it, and it stays in the conversation: a refusal would end an agent's session.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in MEDIA:
        return part
    return {"type": text_type, "text": f"[{MEDIA[kind]} omitted: this model reads text only]"}


ToolChoiceField = Annotated[
    ToolChoice | None, PlainValidator(_choice, json_schema_input_type=str | dict[str, JsonValue] | None)
]
