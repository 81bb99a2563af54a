"""Values that a model writes as plain text, as JSON by the types in the tool's schema."""

import json
from collections.abc import Sequence
from urllib.parse import unquote

from pydantic import JsonValue

from components.output.pythonic import as_json, python_value
from components.output.reader import Reader, Schema, Steps


def typed_value(r: Reader, parameters: Schema, name: str, ends: Sequence[str]) -> Steps[bool]:
    """Read the value of parameter `name` up to one of `ends`, which is left, and report it as JSON of the schema's type.

    A text is reported at once, any other value when complete. Returns: whether the value has an end.
    """
    properties = parameters.get("properties")
    kinds = _kinds(properties.get(name) if isinstance(properties, dict) else None, parameters, set())
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


def _kinds(schema: JsonValue, root: Schema, seen: set[str]) -> set[str]:
    """JSON types of the values that `schema` allows; among them "" if it leaves some open.

    Args:
        schema: a part of `root`.
        root: the schema in which references are resolved.
        seen: references resolved so far. Each one counts once, because they may form a cycle.
    """
    match schema:
        case {"anyOf": [_, *_] as parts} | {"oneOf": [_, *_] as parts} | {"allOf": [_] as parts}:
            return set().union(*(_kinds(part, root, seen) for part in parts))
        case {"enum": [*choices]}:
            return {"string" if isinstance(choice, str) else "null" if choice is None else "" for choice in choices}
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"type": str(kind)}:
            return {kind}
        case {"$ref": str(ref)} if ref.startswith("#/"):
            known = ref in seen
            seen.add(ref)
            return set() if known else _kinds(_resolved(ref, root), root, seen)
    return {""}


def _resolved(ref: str, root: Schema) -> JsonValue:
    """The part of `root` to which a JSON pointer refers, if any."""
    found: JsonValue = dict(root)
    for key in ref.removeprefix("#/").split("/"):
        found = found.get(unquote(key).replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


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
