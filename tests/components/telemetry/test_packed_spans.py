"""A piece has the same content in both formats."""

from typing import Any

import pytest
from opentelemetry.trace import SpanKind, Status, StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import ATTRIBUTE_CHARS, encode_whole
from components.telemetry.packed_spans import PACKED_FIRST, pack_spans
from components.telemetry.spans import step
from components.telemetry.stored_spans import read_piece

TRACE = 1 << 127
VALUES: dict[str, Any] = {
    "text": "a", "unicode": "héé", "yes": True, "zero": 0, "negative": -5, "real": 0.25, "texts": ("a", "b"),
}  # fmt: skip
NOWHERE: list[LightSpan] = []


def request(**attributes: Any) -> LightSpan:
    """Record a request with two steps, one of which fails, and a call with a step."""
    root = LightSpan("chat", TRACE, 7, 1, NOWHERE.append, SpanKind.SERVER, attributes, 5, True)
    with step("frontend.route", root, 6) as routing:
        routing.note(VALUES)
    with pytest.raises(ValueError, match="why"), step("frontend.admit", root, 7):
        raise ValueError("why")
    call = root.child("frontend.dispatch", SpanKind.CLIENT, start_time=8)
    step("inner", call, 9).end(10)
    call.set_status(Status(StatusCode.ERROR, "gone"))
    call.end(11)
    root.add_event("moved", {"from": "d1"}, 12)
    root.end(13)
    return root


def test_packed_spans_are_read_as_those_of_otlp() -> None:
    root = request(**VALUES)
    count, packed = pack_spans([root])
    assert packed[:1] >= PACKED_FIRST > encode_whole(root)[:1]
    read = read_piece(f"{TRACE:032x}", "frontend-f1", packed)
    assert read == read_piece("", "frontend-f1", encode_whole(root))
    assert count == len(read) == 5
    assert [(span.name, span.status, span.error) for span in read] == [
        ("frontend.route", "UNSET", ""),
        ("frontend.admit", "ERROR", "ValueError: why"),
        ("inner", "UNSET", ""),
        ("frontend.dispatch", "ERROR", "gone"),
        ("chat", "UNSET", ""),
    ]


@pytest.mark.parametrize("value", [b"bytes", None, object, {"a": 1}])
def test_a_value_that_otlp_has_not_can_be_read(value: Any) -> None:
    *_, root = read_piece(f"{TRACE:032x}", "s", pack_spans([request(odd=value)])[1])
    assert "odd" in root.attributes


@pytest.mark.parametrize(
    ("value", "shown"), [(1 << 64, str(1 << 64)), ("\ud800b", "?b"), ("x" * 10**6, "x" * ATTRIBUTE_CHARS)]
)
def test_what_no_packed_span_holds_is_written_as_otlp(value: Any, shown: str) -> None:
    _, packed = pack_spans([request(odd=value)])
    assert packed[:1] < PACKED_FIRST
    *_, root = read_piece(f"{TRACE:032x}", "s", packed)
    assert root.attributes["odd"] == shown


@pytest.mark.parametrize("data", [b"", b"\x91", b"\x91\x90", b"\x91\x99" + b"\xc0" * 9, b"\xff\xff", b"\x12\xff"])
def test_a_piece_that_cannot_be_read_has_no_spans(data: bytes) -> None:
    assert read_piece("a", "s", data) == []
