"""Qwen3-Coder's calls: an element per function and parameter, typed by the tool's schema."""

import json
from typing import Final

from pydantic import JsonValue

from components.output.calls import is_tool_name
from components.output.pythonic import as_json, python_value
from components.output.reader import Reader, Schema, Steps

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_ENDS: Final = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + CALL_END)


def qwen3_coder(r: Reader) -> Steps[None]:
    """`<tool_call> <function=f> <parameter=a> 1 </parameter> </function> </tool_call>`, the outermost optional."""
    while begin := (yield from r.until([CALL, FUNCTION], r.emit_text)):
        r.hold()
        if begin == CALL:
            r.skip(len(CALL))
            yield from r.spaces()
        name = (yield from _tag(r)) if (yield from r.literal(FUNCTION)) else ""
        if not is_tool_name(name):
            r.give_back(len(begin))
            continue
        r.begin_call(name)
        yield from _parameters(r, _properties(r.tools.get(name)))
        yield from r.spaces()
        yield from r.closing(CALL_END)


def _tag(r: Reader) -> Steps[str]:
    name: list[str] = []
    if (yield from r.until([">", "<", "\n"], name.append)) != ">":
        return ""
    r.skip()
    return "".join(name).strip()


def _parameters(r: Reader, schemas: Schema) -> Steps[None]:
    """All parameters. A cut-off value leaves the JSON object open, so that clients notice."""
    r.argue("{")
    comma = ""
    while (yield from r.until([PARAMETER, FUNCTION_END, CALL_END], _ignore)) == PARAMETER:
        r.skip(len(PARAMETER))
        if not (name := (yield from _tag(r))):
            continue
        r.argue(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")
        comma = ", "
        yield from r.literal("\n")
        if not (yield from _value(r, schemas.get(name))):
            return
    if (yield from r.char()):
        r.argue("}")
        r.end_call()
    yield from r.closing(FUNCTION_END)


def _value(r: Reader, schema: JsonValue) -> Steps[bool]:
    """A text is reported at once, any other value when complete. Returns: whether the value has an end."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        r.argue('"')
        end = yield from r.until(VALUE_ENDS, lambda text: r.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
        if end:
            r.argue('"')
    else:
        value: list[str] = []
        end = yield from r.until(VALUE_ENDS, value.append)
        if end:
            r.argue(_text_or_null("".join(value)) if kinds == {"string", "null"} else _as_json("".join(value).strip()))
    yield from r.literal("\n")
    yield from r.closing(PARAMETER_END)
    return bool(end)


def _properties(schema: Schema | None) -> Schema:
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


def _ignore(_: str) -> None:
    pass
