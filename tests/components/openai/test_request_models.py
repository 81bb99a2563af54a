import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.completions import CompletionRequest
from components.openai.fields import parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"seed": False}, "seed"),
    ({"priority": 128}, "priority"),
    ({"priority": -128}, "priority"),
    ({"priority": 1.0}, "priority"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1.5}, "min_tokens"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"07": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias.1"),
    ({"logit_bias": {"1": float("inf")}}, "logit_bias.1"),
    ({"logit_bias": {"1": True}}, "logit_bias.1"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": "a"}}, "stream_options.continuous_usage_stats"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"user": 7}, "user"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": user(None)}, "messages[0].content"),
    ({"messages": user(7)}, "messages[0].content"),
    ({"messages": user([])}, "messages[0].content"),
    ({"messages": user(["hi"])}, "messages[0].content[0]"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
    ({"messages": user([{"type": "text", "text": "a", "x": 1}])}, "messages[0].content[0].x"),
    ({"messages": user([{"type": "image_url", "image_url": {"url": "http://x"}}])}, "messages[0].content[0].type"),
    ({"messages": user([{"type": "text", "text": "a"}, {"type": "input_audio"}])}, "messages[0].content[1].type"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages[0].mood"),
]
UNSUPPORTED: list[tuple[str, Any, list[Any]]] = [
    # parameter, a value that is refused, the neutral values that pass
    ("functions", [{}], [[]]),
    ("modalities", ["audio"], [["text"]]),
    ("audio", {}, []),
    ("service_tier", "gold", ["auto", "default", "flex", "priority"]),
    ("store", True, [False]),
    ("web_search_options", {}, []),
]
FROM_OUTSIDE = ["kv_transfer_params", "bootstrap_room", "bootstrap_host", "chat_template", "prompt_embeds", "foo"]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat(**fields)
    assert caught.value.fields["param"] == param
    assert param in caught.value.message


@pytest.mark.parametrize(("param", "refused", "neutral"), UNSUPPORTED)
def test_what_we_cannot_honour_is_refused_and_its_neutral_value_is_not(
    param: str, refused: Any, neutral: list[Any]
) -> None:
    with pytest.raises(Rejected, match=param) as caught:
        chat(**{param: refused})
    assert caught.value.fields == {"param": param, "code": "unsupported_parameter"}
    for value in [*neutral, None]:
        chat(**{param: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": [{}]}, "'functions' is not supported: use 'tools'."),
        ({"function_call": {"name": "f"}}, "'function_call' is not supported: use 'tool_choice'."),
        ({"audio": {}}, "'audio' is not supported: leave it out."),
        (
            {"modalities": ["audio"]},
            "'modalities' has a value that this server does not support: send ['text'] or leave it out.",
        ),
    ],
)
def test_a_refusal_names_what_to_send_instead(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize("param", FROM_OUTSIDE)
def test_an_unknown_parameter_is_refused(param: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(Rejected, match="Unknown parameter") as caught:
            parse(**{param: None})
        assert caught.value.fields == {"param": param, "code": "unknown_parameter"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"a":\xff}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"seed":' + b"9" * 5000 + b"}"],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Rejected, match="not valid JSON") as caught:
        parse_body(ChatRequest, body)
    assert caught.value.fields == {"code": "invalid_json"}


@pytest.mark.parametrize("body", [b"[]", b"1", b'"a"', b"null"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Rejected, match="must be a JSON object"):
        parse_body(ChatRequest, body)


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=64))
def test_no_bytes_do_more_than_be_refused(body: bytes) -> None:
    for model in (ChatRequest, CompletionRequest):
        try:
            parse_body(model, body)
        except Rejected:
            continue


@settings(deadline=None)  # the machine may be busy
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(sorted({**ChatRequest.model_fields, **CompletionRequest.model_fields})),
)
def test_no_value_of_any_field_does_more_than_be_refused(value: Any, field: str) -> None:
    for parse in (chat, completion):
        faults: list[Rejected] = []
        try:
            parse(**{field: value})
        except Rejected as exc:
            faults.append(exc)
        assert all(fault.fields.get("param") or fault.fields["code"] == "invalid_json" for fault in faults)


def test_what_the_openai_client_sends_out_of_habit_is_accepted() -> None:
    request = chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True, n=1, seed=None
    )
    assert request.stop == []
    assert not request.include_usage


def test_an_answer_can_be_sent_back_with_all_its_fields() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None}
    chat(messages=[*user("q"), answer, *user("r")])


def test_parts_are_joined_and_a_developer_speaks_as_the_system() -> None:
    request = chat(messages=[{"role": "developer", "content": [{"type": "text", "text": t} for t in ("a", "b")]}])
    assert [m.for_template() for m in request.messages] == [{"role": "system", "content": "a\nb"}]


def test_either_name_of_the_token_limit_counts_but_not_both_against_each_other() -> None:
    assert chat(max_tokens=3).token_limit == 3
    assert chat(max_completion_tokens=4).token_limit == 4
    assert chat(max_tokens=5, max_completion_tokens=5).token_limit == 5
    assert chat().token_limit is None
    with pytest.raises(Rejected, match="differ"):
        _ = chat(max_tokens=5, max_completion_tokens=6).token_limit


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="a").stop == ["a"]
    assert chat(stop=list("abcd")).stop == list("abcd")
    assert chat(stop=None).stop == []


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_every_form_of_a_prompt_is_read(prompt: Any, read: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        (7, "prompt"),
        ({}, "prompt"),
        ([-1], "prompt"),
        ([1.0], "prompt"),
        ([True], "prompt"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt"),
        ([2**31], "prompt"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [[2]]], "prompt[1]"),
        (["a"] * 129, "prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, param: str) -> None:
    with pytest.raises(Rejected) as caught:
        completion(prompt=prompt)
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(("param", "refused", "neutral"), [("best_of", 2, 1), ("suffix", "x", "")])
def test_a_completion_refuses_what_it_cannot_honour(param: str, refused: Any, neutral: Any) -> None:
    with pytest.raises(Rejected, match=param):
        completion(**{param: refused})
    completion(**{param: neutral})
