"""Any value of any field of a message or response is at worst refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.anthropic.events import content_of
from components.anthropic.messages import CountRequest, MessagesRequest
from components.errors import Rejected
from components.openai.fields import parse_body
from components.openai.items import ItemReference
from components.openai.responses import ResponsesRequest
from components.output.blocks import Block

MESSAGE = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "m", "input": "hi"}
KINDS = ["text", "tool_use", "tool_result", "thinking", "message", "function_call", "function_call_output", "reasoning"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from(["", "user", "assistant", "auto", *KINDS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "id", "name", "input", "call_id", "output", "schema", "<x>"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=80)  # the machine may be busy
@given(VALUES, st.sampled_from(sorted(MessagesRequest.model_fields)))
def test_no_value_of_a_messages_field_does_more_than_be_refused(value: Any, field: str) -> None:
    check(MessagesRequest, {**MESSAGE, field: value})


@settings(deadline=None, max_examples=80)
@given(VALUES, st.sampled_from(sorted(ResponsesRequest.model_fields)))
def test_no_value_of_a_responses_field_does_more_than_be_refused(value: Any, field: str) -> None:
    check(ResponsesRequest, {**RESPONSE, field: value})


def check(kind: type[MessagesRequest] | type[ResponsesRequest], body: dict[str, Any]) -> None:
    fault: Rejected | None = None
    try:
        request = parse_body(kind, json.dumps(body).encode())
        request.check()
        if isinstance(request, ResponsesRequest):
            request.chat([], [item for item in request.input if not isinstance(item, ItemReference)])
        else:
            request.chat()
    except Rejected as exc:
        fault = exc
    if fault is not None:
        assert fault.fields.get("param") or fault.fields["code"] == "invalid_json"


def test_to_count_tokens_takes_no_more_than_the_prompt_needs() -> None:
    parse_body(CountRequest, json.dumps({"model": "m", "messages": MESSAGE["messages"]}).encode())
    with pytest.raises(Rejected, match="max_tokens"):
        parse_body(CountRequest, json.dumps(MESSAGE).encode())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("nonsense", {"": "nonsense"}),
        ("[1]", {"": "[1]"}),
        ('{"a": [1, {"b": 1e400}]}', {"": '{"a": [1, {"b": 1e400}]}'}),  # it was null
    ],
)
def test_the_input_of_a_tool_is_an_object_whatever_the_model_wrote(arguments: str, told: dict[str, Any]) -> None:
    block = Block("call", 0, "id", "f")
    block.add(arguments)
    assert content_of(block)["input"] == told
