"""A text through a format, cut as a test likes."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple

from components.output.calls import CallDelta, whole_calls
from components.output.formats import TOOL_FORMATS
from components.output.reader import Reader

FORMATS = {str(name): found.read for name, found in TOOL_FORMATS.items()}
TOOLS: Mapping[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "k": {"enum": ["x", "y"]},
            "o": {"type": "object"},
            "sn": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ns": {"type": ["null", "string"]},
            "kn": {"enum": ["x", None]},
            "si": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "ref": {"$ref": "#/$defs/Mode"},
            "one": {"allOf": [{"$ref": "#/$defs/Mode"}], "default": "1"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]},
            "deep": {"$ref": "#/$defs/a~1b%20c/properties/x"},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Lost"},
        },
        "$defs": {
            "Mode": {"enum": ["1", "none", "x"]},  # of an Enum in a pydantic model
            "a/b c": {"properties": {"x": {"type": "string"}}},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}, {"$ref": "#/$defs/Loop"}]},
        },
    },
    "g": {},
}


class Read(NamedTuple):
    """The answer, and calls as (name, arguments)."""

    text: str
    calls: list[tuple[str, str]]


def read(name: str, text: str, cuts: Iterable[int] = (), *, single: bool = False) -> Read:
    """Read a text, and check every rule of deltas."""
    numbers = count()
    reader = Reader(FORMATS[name], TOOLS, lambda: f"id-{next(numbers)}", single=single)
    said, deltas, at = "", list[CallDelta](), 0
    for cut in [*sorted(cuts), len(text)]:
        found = reader.feed(text[at:cut])
        said, deltas, at = said + found.text, [*deltas, *found.calls], cut
    found = reader.end()
    said, deltas = said + found.text, [*deltas, *found.calls]
    begun = 0
    for delta in deltas:
        if delta.name is not None:
            assert (delta.index, delta.id, delta.arguments) == (begun, f"id-{begun}", "")
            begun += 1
        else:
            assert delta.id is None
            assert delta.index == begun - 1
            assert delta.arguments
    assert reader.num_calls == begun
    return Read(said, [(call.name, call.arguments) for call in whole_calls(deltas)])


def read_any_way(name: str, text: str, *, single: bool = False) -> Read:
    """Read a text as a whole, cut in two at every place, and by letters; the results must be equal."""
    whole = read(name, text, single=single)
    for cut in range(1, len(text)):
        assert read(name, text, [cut], single=single) == whole, (text[:cut], text[cut:])
    assert read(name, text, range(len(text)), single=single) == whole
    return whole
