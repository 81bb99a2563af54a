"""Checks that a JSON schema has only keywords that are enforced or constrain nothing."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

ONE: Final = {"additionalProperties", "additionalItems", "items"}  # keywords that hold a schema
LIST: Final = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
MAP: Final = {"$defs", "definitions", "patternProperties", "properties"}
VALUES: Final = {
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
}
NOTES: Final = {  # no constraint on values
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
}
KNOWN: Final = ONE | LIST | MAP | VALUES | NOTES
NUMBERS: Final = {"const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}
MAX_DIGITS: Final = 15  # of a number with a fraction or an exponent; a double represents this many
MAX_INTEGER: Final = 2**53  # a double represents every integer up to here exactly
MAX_DEPTH: Final = 100  # levels of objects and lists; the compiler allows 127 of its own
MAX_VALUES: Final = 50_000


def fault_in_schema(schema: Any) -> str | None:
    """The fault in `schema`, if one can be found before compilation."""
    if not isinstance(schema, dict | bool):
        return "a schema must be an object"
    return _size_fault(schema) or next(_faults(schema), None)


def _size_fault(schema: Any) -> str | None:
    count = 0
    level = [schema]
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            return f"it has more than {MAX_VALUES} values"
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return None
    return f"it is nested deeper than {MAX_DEPTH} levels"


def _faults(schema: Any) -> Iterator[str]:
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        at, inner = pending.pop()
        if not isinstance(inner, dict):
            continue  # the compiler reports anything but true and false
        for keyword in inner:
            if keyword not in KNOWN:
                yield f"the keyword '{keyword}'{_place(at)} is not supported"
        yield from _not_kept(at, inner)
        pending += _inner_schemas(at, inner)


def _inner_schemas(at: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        path = f"{at}/{keyword}"
        if keyword in MAP and isinstance(value, dict):
            yield from ((f"{path}/{name}", inner) for name, inner in value.items())
        elif keyword in LIST and isinstance(value, list):
            yield from ((f"{path}/{i}", inner) for i, inner in enumerate(value))
        elif keyword in ONE:
            yield path, value


def _not_kept(at: str, schema: dict[str, Any]) -> Iterator[str]:
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, named):  # a repeated undeclared key counts once
        yield f"the keyword 'minProperties'{_place(at)} is not supported above the number of required properties"
    for keyword in NUMBERS & schema.keys():
        if fault := next(filter(None, map(_rounding, _numbers(schema[keyword]))), None):
            yield f"the keyword '{keyword}'{_place(at)} has {fault}"


def _numbers(value: Any) -> Iterator[int | float]:
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict | list):
            pending += inner.values() if isinstance(inner, dict) else inner
        elif isinstance(inner, int | float):
            yield inner


def _rounding(number: float) -> str | None:
    """Why the compiler, which computes with doubles, could not represent `number` exactly."""
    if isinstance(number, int):
        return f"an integer beyond {MAX_INTEGER}" if abs(number) > MAX_INTEGER else None
    digits = len(Decimal(repr(number)).normalize().as_tuple().digits)
    return f"a number of more than {MAX_DIGITS} digits" if digits > MAX_DIGITS else None


def _place(at: str) -> str:
    return f" at '{at[:200]}'" if at else ""
