"""Schemas that cannot be enforced are refused by the name of the keyword."""

import time
from typing import Any

import pytest

from components.structured.schema import MAX_VALUES, fault_in_schema
from tests.components.structured.random_schemas import random_schema


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "string", "minLenght": 3}, "'minLenght'"),
        ({"not": {}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"properties": {"a": {"items": {"contains": {}}}}}, "'contains' at '/properties/a/items'"),
        ({"$defs": {"x": {"propertyNames": {}}}}, "'propertyNames' at '/$defs/x'"),
        ({"anyOf": [{}, {"unevaluatedItems": False}]}, "'unevaluatedItems' at '/anyOf/1'"),
        ({"prefixItems": [{"nullable": True}]}, "'nullable' at '/prefixItems/0'"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "'minProperties'"),
        ([], "must be an object"),
        ("string", "must be an object"),
        (nested(101), "deeper than 100"),
        ({"properties": {"a": {"maximum": -3.9000000000000004}}}, "'maximum' at '/properties/a'"),
        ({"const": 12345678901234567890}, "'const'"),
        ({"enum": [1, [{"a": 0.1234567890123456}]]}, "'enum'"),
        ({"enum": list(range(MAX_VALUES))}, f"more than {MAX_VALUES}"),
    ],
)
def test_the_keyword_and_its_place_are_named(schema: Any, named: str) -> None:
    fault = fault_in_schema(schema)
    assert fault is not None
    assert named in fault


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"properties": {"not": {"type": "string"}, "if": True}},  # names of properties are no keywords
        {"const": {"not": 1}, "default": {"if": 2}, "examples": [{"contains": 3}]},  # nor are those in values
        {"enum": [{"uniqueItems": True}]},
        nested(98),
        {"minimum": 0.1, "maximum": 1e300, "const": 123456789012345},
        {"minProperties": 1},
    ],
)
def test_names_and_values_are_not_taken_for_keywords(schema: Any) -> None:
    assert fault_in_schema(schema) is None


def test_the_bounds_of_a_safe_integer_are_accepted() -> None:
    """Integers of 16 digits were refused, such as the two bounds of Zod 4's `z.int()`."""
    safe = 2**53 - 1
    assert fault_in_schema({"type": "integer", "minimum": -safe, "maximum": safe}) is None
    assert fault_in_schema({"exclusiveMinimum": -(2**53), "exclusiveMaximum": 2**53, "enum": [safe]}) is None
    assert "'maximum' has an integer beyond" in (fault_in_schema({"maximum": 2**53 + 1}) or "")
    assert "'const' has an integer beyond" in (fault_in_schema({"const": -(2**53) - 1}) or "")


def test_what_the_random_schemas_are_made_of_is_supported() -> None:
    assert [fault_in_schema(random_schema(seed)) for seed in range(100)] == [None] * 100


def test_a_large_schema_is_looked_at_quickly() -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(MAX_VALUES // 3)}}
    began = time.process_time()
    assert fault_in_schema(schema) is None
    assert time.process_time() - began < 1
