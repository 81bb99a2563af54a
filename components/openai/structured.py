"""The form of an answer's text: `response_format`, and vLLM's fields for it."""

import json
from functools import cached_property
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue
from pydantic_core import from_json

from components.errors import Rejected
from components.openai.fields import AskedConstraint, GenerationFields, Strict
from components.openai.json_size import fault_in_text
from components.wire.sampling import Constraint

MAX_TEXT_CHARS: Final = 256 * 1024  # of a schema, as compact JSON and as sent in a string, or of a choice
MAX_GRAMMAR_CHARS: Final = 64 * 1024
MAX_REGEX_CHARS: Final = 16 * 1024
MAX_CHOICES: Final = 10_000

Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choice = Annotated[list[Annotated[str, Field(max_length=MAX_TEXT_CHARS)]], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, JsonValue] | str  # or its JSON text


class JsonSchemaFormat(Strict):
    """A schema; its name is only for the client."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    strict: bool | None = None  # ignored: every answer satisfies its schema


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """vLLM's form; exactly one of these."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Choice | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class ConstrainedFields(GenerationFields):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choice | None = None
    guided_grammar: Grammar | None = None

    @cached_property
    def asked_constraint(self) -> AskedConstraint | None:
        """The constraint, if any. Raises: Rejected, if there are several, or it is invalid."""
        asked = [*self._of_response_format(), *self._of_structured_outputs(), *self._guided()]
        if len(asked) > 1:
            raise Rejected(
                f"'{asked[0].param}' and '{asked[1].param}' both constrain the answer; send only one of them.",
                param=asked[1].param,
                code="invalid_value",
            )
        return asked[0] if asked else None

    def check(self) -> None:
        super().check()
        _ = self.asked_constraint

    def _of_response_format(self) -> list[AskedConstraint]:
        wanted, param = self.response_format, "response_format"
        if wanted is None:
            return []
        described = wanted.json_schema
        if (described is None) is (wanted.type == "json_schema"):
            raise Rejected(
                f"'{param}.json_schema' is required with type 'json_schema', and not allowed with another type.",
                param=f"{param}.json_schema",
                code="missing_required_parameter" if described is None else "invalid_value",
            )
        if described is not None:
            return [_json(described.schema_, f"{param}.json_schema.schema")]
        return [_json({"type": "object"}, param)] if wanted.type == "json_object" else []

    def _of_structured_outputs(self) -> list[AskedConstraint]:
        wanted, param = self.structured_outputs, "structured_outputs"
        if wanted is None:
            return []
        asked = _asked(param + ".", wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        if wanted.json_object:
            asked.append(_json({"type": "object"}, f"{param}.json_object"))
        if not asked:
            raise Rejected(f"'{param}' must have one of its fields.", param=param, code="invalid_value")
        return asked

    def _guided(self) -> list[AskedConstraint]:
        return _asked("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)


def _asked(
    prefix: str, schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[AskedConstraint]:
    asked = []
    if schema is not None:
        asked.append(_json(schema, f"{prefix}json"))
    if regex is not None:
        asked.append(AskedConstraint(Constraint(kind="regex", text=regex), f"{prefix}regex"))
    if choice is not None:
        asked.append(_choice(choice, f"{prefix}choice"))
    if grammar is not None:
        asked.append(AskedConstraint(Constraint(kind="lark", text=grammar), f"{prefix}grammar"))
    return asked


def _json(schema: Schema, param: str) -> AskedConstraint:
    if isinstance(schema, str):
        _bounded(schema, param)  # before parsing: a long text of small values is slow to parse
        if (fault := fault_in_text(schema.encode())) is not None:
            raise Rejected(f"'{param}' {fault}.", param=param, code="invalid_value")
    try:
        value = from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as exc:
        raise Rejected(f"Invalid '{param}': it is not valid JSON: {exc}.", param=param, code="invalid_value") from exc
    return AskedConstraint(Constraint(kind="json_schema", text=_bounded(text, param)), param)


def _choice(choice: list[str], param: str) -> AskedConstraint:
    """One terminal: with rules, thousands of alternatives would be open at once."""
    # llguidance takes DEL as an escape only
    quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in choice)
    text = "start: CHOICE\nCHOICE: " + " | ".join(quoted)
    return AskedConstraint(Constraint(kind="lark", text=_bounded(text, param)), param)


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise Rejected(
            f"Invalid '{param}': it has {len(text)} characters, at most {MAX_TEXT_CHARS} are allowed.",
            param=param,
            code="invalid_value",
        )
    return text
