import json
from typing import Any

import pytest

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.fields import parse_body
from components.openai.json_size import MAX_VALUES
from components.openai.tools import ToolChoice

HI = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "content": "42", "tool_call_id": "call_1"}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps({"model": "m", "messages": [HI], **fields}).encode())


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def test_arguments_with_more_values_than_a_body_may_hold_are_refused() -> None:
    """They are JSON in a JSON string, whose values were not counted: 4 MB of them blocked the event loop for 0.5 s."""
    arguments = '{"a": [' + "[]," * MAX_VALUES + "[]]}"
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(Rejected, match="is too complex: at most") as refused:
        chat(messages=[HI, {**CALLING, "tool_calls": [call]}, ANSWER])
    assert refused.value.fields["param"] == "messages[1].tool_calls[0].function.arguments"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool("f\n")]}, "tools[0].function.name"),
    ({"tools": [tool(7)]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools[2].function.name"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [tool(description=7)]}, "tools[0].function.description"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(color="red")]}, "tools[0].function.color"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties"),
    ({"tools": [tool(parameters={"properties": {"a": 7}})]}, "tools[0].function.parameters.properties.a"),
    (
        {"tools": [tool(parameters={"properties": {"a": {"type": "int"}}})]},
        "tools[0].function.parameters.properties.a.type",
    ),
    (
        {"tools": [tool(parameters={"properties": {"a": {"type": [[]]}}})]},
        "tools[0].function.parameters.properties.a.type",
    ),
    ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": named("f")}, "tool_choice"),
    ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": "any", "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": ["auto"], "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {**named("f"), "x": 1}, "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}}, "tool_choice"),
    ({"tool_choice": allowed("required"), "tools": [tool()]}, "tool_choice"),
    ({"tool_choice": allowed("auto", "g"), "tools": [tool()]}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"messages": [HI, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1].content"),
    ({"messages": [{**HI, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [HI, {**CALLING, "tool_calls": [{**CALL, "type": "custom"}]}]}, "messages[1].tool_calls[0].type"),
    ({"messages": [HI, {**CALLING, "tool_calls": [{**CALL, "id": ""}]}]}, "messages[1].tool_calls[0].id"),
    ({"messages": [HI, {**CALLING, "tool_calls": [CALL] * 257}]}, "messages[1].tool_calls"),
    (
        {"messages": [HI, {**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [HI, {**CALLING, "reasoning_content": 7}]}, "messages[1].reasoning_content"),
    ({"messages": [HI, CALLING, {"role": "tool", "content": "42"}]}, "messages[2].tool_call_id"),
    ({"messages": [HI, CALLING, {**ANSWER, "tool_call_id": "call_2"}]}, "messages[2].tool_call_id"),
    ({"messages": [HI, CALLING, {"role": "tool", "tool_call_id": "call_1"}]}, "messages[2].content"),
    ({"messages": [HI, ANSWER]}, "messages[1].role"),
    ({"messages": [HI, CALLING, ANSWER, HI, ANSWER]}, "messages[4].role"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_a_wrong_tool_call_or_choice_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat(**fields)
    assert caught.value.fields["param"] == param
    assert param in caught.value.message


def test_tools_and_their_choice_are_taken() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": True}, "required": ["a"]}
    request = chat(tools=[tool(description="d", parameters=parameters, strict=True), tool("g")], tool_choice=named("g"))
    told = request.conversation()
    assert told.choice == ToolChoice("named", "g")
    assert told.parallel
    assert [t.for_template()["function"] for t in told.tools] == [
        {"name": "f", "description": "d", "parameters": parameters},
        {"name": "g", "parameters": {"type": "object", "properties": {}}},
    ]


def test_only_allowed_tools_are_offered() -> None:
    for mode in ("auto", "required"):
        told = chat(tools=[tool(), tool("g")], tool_choice=allowed(mode, "g")).conversation()
        assert [t.function.name for t in told.tools] == ["g"]
        assert told.choice.mode == mode


def test_with_the_choice_none_no_tool_is_offered() -> None:
    assert chat(tools=[tool()], tool_choice="none").conversation().tools == ()
    assert chat(tools=[tool()], parallel_tool_calls=False).conversation().parallel is False


def test_a_conversation_with_calls_is_as_templates_know_it() -> None:
    thinking = {**CALLING, "reasoning": "hm", "tool_calls": [CALL, {**CALL, "id": "call_2", "index": 1}]}
    messages = (
        chat(messages=[HI, thinking, ANSWER, {**ANSWER, "tool_call_id": "call_2", "name": "own"}])
        .conversation()
        .messages
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{i}", "type": "function", "function": function} for i in (1, 2)],
        "reasoning_content": "hm",
    }
    assert messages[2] == {"role": "tool", "content": "42", "tool_call_id": "call_1", "name": "f"}
    assert messages[3]["name"] == "own"


@pytest.mark.parametrize(("arguments", "told"), [("", {}), ("{", "{"), ("[1]", "[1]"), ("[" * 5000, "[" * 5000)])
def test_arguments_that_a_model_got_wrong_stay_as_they_are(arguments: str, told: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = chat(messages=[HI, {**CALLING, "tool_calls": [call]}]).conversation().messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == told


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "a", "refusal": None, "tool_calls": None, "annotations": []},
        {"content": None, "refusal": "I will not."},
        {"content": None, "reasoning_content": "hm"},
    ],
)
def test_an_answer_comes_back_as_it_was_given(answer: dict[str, Any]) -> None:
    (_, told) = chat(messages=[HI, {"role": "assistant", **answer}]).conversation().messages
    assert told["content"] == (answer["content"] or answer.get("refusal") or "")
    assert "tool_calls" not in told
