"""Values that a model writes as plain text, converted to JSON by the types in the tool's schema."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from components.output.pythonic import as_json, python_value
from components.output.reader import Reader, Schema, Steps


def typed_value(r: Reader, schema: JsonValue, ends: Sequence[str]) -> Steps[bool]:
    """Read a value up to one of `ends`, which is left, and report it as JSON of the schema's type.

    A text is reported at once, any other value when it is complete. Returns: whether the value has an end.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        r.argue('"')
        end = yield from r.until(ends, lambda text: r.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
        if end:
            r.argue('"')
    else:
        value: list[str] = []
        end = yield from r.until(ends, value.append)
        if end:
            r.argue(_text_or_null("".join(value)) if kinds == {"string", "null"} else _as_json("".join(value).strip()))
    return bool(end)


def ignore(_: str) -> None:
    """Report nothing, for `Reader.until`."""


def properties_of(schema: Schema | None) -> Schema:
    found = (schema or {}).get("properties")
    return found if isinstance(found, dict) else {}


def _kinds(schema: JsonValue) -> set[str]:
    """Return the JSON types of the values that `schema` allows; among them "" if it leaves some open."""
    match schema:
        case {"anyOf": [_, *_] as alternatives} | {"oneOf": [_, *_] as alternatives}:
            return set().union(*map(_kinds, alternatives))
        case {"enum": [*choices]}:
            return {"string" if isinstance(choice, str) else "null" if choice is None else "" for choice in choices}
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"type": str(kind)}:
            return {kind}
    return {""}


def _text_or_null(text: str) -> str:
    return "null" if text.strip().lower() in {"null", "none"} else json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """Read JSON or Python, or else a string."""
    constants = {"true": "true", "false": "false", "null": "null", "none": "null"}
    if (constant := constants.get(text.lower())) is not None:
        return constant
    for read in (json.loads, python_value):
        try:
            return as_json(read(text))
        except (ValueError, TypeError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
