"""Random JSON schemas of all supported keywords, from a seed."""

import random
from typing import Any

PATTERNS = ["^[a-z]{2,5}$", "^[0-9]+-[0-9]+$", "x[yz]*", "^(red|green)$", r"^\d{3}$", r"^\w+\s\w$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"]


def random_schema(seed: int) -> dict[str, Any]:
    """Make a schema whose answers tend to be short."""
    return _Maker(random.Random(seed)).root()


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._defs: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self._object(3) if self._chance.random() < 0.7 else self._any(3)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> dict[str, Any]:
        simple = [self._string, self._integer, self._number, self._plain, self._one_of_values]
        deep = [self._object, self._array, self._any_of, self._all_of, self._one_of, self._ref, self._types]
        make = self._chance.choice(simple + deep if depth else simple)
        return {**make(depth), **({"title": "t", "description": "d"} if self._chance.random() < 0.1 else {})}

    def _string(self, depth: int) -> dict[str, Any]:
        match self._chance.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._chance.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self._chance.choice(FORMATS)}
            case 2:
                least = self._chance.randrange(5)
                return {"type": "string", "minLength": least, "maxLength": least + self._chance.randrange(9)}
        return {"type": "string"}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._chance.randint(-1000, 1000)
        bounds = {"minimum": low, "maximum": low + self._chance.randrange(1, 500)}
        match self._chance.randrange(4):
            case 0:
                return {"type": "integer", **bounds}
            case 1:
                return {"type": "integer", "exclusiveMinimum": low}
            case 2:
                return {"type": "integer", "multipleOf": self._chance.choice([2, 3, 5, 7])}
        return {"type": "integer"}

    def _number(self, depth: int) -> dict[str, Any]:
        low = round(self._chance.uniform(-10, 10), 2)
        match self._chance.randrange(3):
            case 0:
                return {"type": "number", "minimum": low, "maximum": round(low + 5, 2)}
            case 1:
                return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": round(low + 1, 2)}
        return {"type": "number"}

    def _plain(self, depth: int) -> dict[str, Any]:
        return {"type": self._chance.choice(["boolean", "null"])}

    def _types(self, depth: int) -> dict[str, Any]:
        return {"type": self._chance.sample(["string", "integer", "boolean", "null", "number"], 2)}

    def _one_of_values(self, depth: int) -> dict[str, Any]:
        values: list[Any] = ["a", "b c", 'qu"ote', "é", 1, -5, 2.5, True, None, [1, 2], {"k": "v"}, ""]
        chosen = self._chance.sample(values, self._chance.randint(1, 5))
        return {"const": chosen[0]} if self._chance.random() < 0.3 else {"enum": chosen}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._chance.sample(["name", "age", "a b", "é", "x-1", "list", "nested"], self._chance.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {n: self._any(depth - 1) for n in names}}
        schema["required"] = [name for name in names if self._chance.random() < 0.7]
        match self._chance.randrange(5):
            case 0:
                schema["additionalProperties"] = self._any(0)
            case 1:
                schema["patternProperties"] = {"^p[0-9]$": self._any(0)}
                schema["additionalProperties"] = False
            case 2:
                schema["minProperties"] = len(schema["required"])
                schema["additionalProperties"] = False
            case _:
                schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._chance.randrange(3)
        schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + self._chance.randrange(3)}
        if self._chance.random() < 0.3:
            schema["prefixItems"] = [self._any(depth - 1), self._any(depth - 1)]
        return {**schema, "items": self._any(depth - 1)}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._chance.randint(1, 3))]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        kinds = self._chance.sample(["one", "two", "three"], 2)
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "of": self._any(depth - 1)},
                    "required": ["kind", "of"],
                    "additionalProperties": False,
                }
                for kind in kinds
            ]
        }

    def _all_of(self, depth: int) -> dict[str, Any]:
        left, right = ({"type": "object", "properties": {n: self._any(depth - 1)}, "required": [n]} for n in "lr")
        return {"allOf": [left, right], "type": "object", "maxProperties": 3}

    def _ref(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}
        made = self._any(depth - 1)
        if self._chance.random() < 0.3:  # a tree
            again = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 1}
            made = {"type": "object", "properties": {"v": made, "more": again}, "required": ["v"]}
            made["additionalProperties"] = False
        self._defs[name] = made
        return {"$ref": f"#/$defs/{name}"}
