"""Counts of a JSON text's values, without parsing, are those of a parser."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import Rejected
from components.openai import json_size
from components.openai.chat import ChatRequest
from components.openai.completions import CompletionRequest
from components.openai.fields import parse_body
from components.openai.json_size import MAX_ITEMS, MAX_VALUES, SMALL_BYTES, check_text, check_value
from components.openai.tokens import DetokenizeRequest

USER = {"role": "user", "content": "a"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\,[]{}é\n😀')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[]{}:')), inner),
    max_leaves=30,
)


def held(value: Any) -> tuple[int, int]:
    """Return the numbers of strings, objects and arrays, and of commas."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [held(item) for item in value] + [
        held(item) for item in (value.values() if isinstance(value, dict) else ())
    ]
    return 1 + sum(i for i, _ in inner), max(0, len(value) - 1) + sum(commas for _, commas in inner)


@given(value=values, slice_bytes=st.integers(1, 40), ascii_only=st.booleans())
def test_counts_are_those_of_the_value_wherever_the_text_is_cut(value: Any, slice_bytes: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    num_values, commas = held(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "SMALL_BYTES", 0)
        patch.setattr(json_size, "SLICE_BYTES", slice_bytes)
        patch.setattr(json_size, "MAX_VALUES", num_values)
        patch.setattr(json_size, "MAX_ITEMS", commas)
        check_text(body)
        if num_values:
            patch.setattr(json_size, "MAX_VALUES", num_values - 1)
            with pytest.raises(Rejected):
                check_text(body)
        if commas > num_values:
            patch.setattr(json_size, "MAX_VALUES", num_values)
            patch.setattr(json_size, "MAX_ITEMS", commas - num_values - 1)
            with pytest.raises(Rejected):
                check_text(body)


@given(st.binary(max_size=200), st.integers(1, 8))
def test_any_bytes_can_be_counted(body: bytes, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "SMALL_BYTES", 0)
        patch.setattr(json_size, "SLICE_BYTES", slice_bytes)
        check_text(body)


def test_half_a_million_token_ids_are_a_request_and_as_many_other_numbers_are_none() -> None:
    ids = [7] * 500_000
    assert parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": ids}).encode()).prompt == [ids]
    halves = [ids[:250_000]] * 2
    assert parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": halves}).encode()).prompt == halves
    assert parse_body(DetokenizeRequest, json.dumps({"tokens": ids}).encode()).tokens == ids
    for field in ({"guided_json": {"enum": ids}}, {"prompt": [[ids]]}, {"prompt": [{"a": ids}]}):
        with pytest.raises(Rejected, match="is too complex"):
            parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": "a", **field}).encode())


def test_as_many_messages_as_there_may_be_with_parts_and_calls_are_a_request() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": 'a "quoted", [text] {like} this\\'}] * 2}
    body = json.dumps({"model": "m", "messages": [parts] * 4096}).encode()
    assert len(parse_body(ChatRequest, body).messages) == 4096


@pytest.mark.parametrize("item", ["{}", "[]", '""', '"\\""', "0"])
def test_a_body_of_nothing_but_small_values_is_refused_before_it_is_parsed(
    item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million empty objects took the parser, and with it the event loop, a second."""
    monkeypatch.setattr("components.openai.fields.jiter.from_json", None)
    count = 1 + (MAX_ITEMS + MAX_VALUES if item == "0" else MAX_VALUES)
    with pytest.raises(Rejected, match="is too complex"):
        parse_body(ChatRequest, f'{{"x":[{",".join([item] * (count + 1))}]}}'.encode())


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 4000, "0." + "1" * 400])
def test_a_number_longer_than_any_float_is_refused_before_it_is_parsed(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few thousand integers of 4,000 digits took the parser 70 ms."""
    monkeypatch.setattr("components.openai.fields.jiter.from_json", None)
    with pytest.raises(Rejected, match="more than 400 digits"):
        parse_body(CompletionRequest, f'{{"x":"{"a" * SMALL_BYTES}","prompt":[{number}]}}'.encode())


def test_long_numbers_within_a_text_are_no_numbers() -> None:
    body = json.dumps({"model": "m", "prompt": "9" * SMALL_BYTES, "seed": int("9" * 17)}).encode()
    assert parse_body(CompletionRequest, body).seed == int("9" * 17)


def test_keys_are_counted_at_any_depth() -> None:
    many = {str(i): 0 for i in range(2049)}
    for value in (many, [many], {"prompt": [many]}, {"prompt": [[many]]}, {"a": [{"b": many}]}):
        with pytest.raises(Rejected, match="2049 keys"):
            check_value(json.dumps(value).encode(), value)
