"""Tools and reasoning through the openai package, over a mesh that says what a test wants."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import openai as package
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from components.http.server import serve_http
from components.openai.chat import Conversation
from components.output.formats import FormatOptions
from components.structured.checker import ConstraintChecker
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.conversation import AnswerPlan, plan_answer
from services.frontend.ports import ServedModel
from tests.components.output.test_tool_formats import HARD as HARDEST
from tests.components.output.test_tool_formats import ONE
from tests.components.text.tiny_model import TEMPLATE, tiny_tokenizer
from tests.services.frontend.fake_mesh import MODEL, FakeMesh, logprobs_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
HARD = HARDEST.replace("[TOOL_CALLS] ", "")  # in a string, a special token is skipped as anywhere
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
F: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
G: Any = {"type": "function", "function": {"name": "g"}}
STRICT: Any = {"type": "function", "function": {**F["function"], "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "g"}}
SHAPE: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"]  # noqa: RUF001
THINKS = (
    TEMPLATE
    + "{{ tools or '' }}<tool_call>{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
)


@cache  # making one takes 0.2 s: its encoder is checked
def model(template: str = TEMPLATE, options: FormatOptions = FormatOptions()) -> TextModel:  # noqa: B008
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    return TextModel(tokenizer, template, {}, None, options)


def native(name: Any) -> TextModel:
    return model(TEMPLATE + "{{ tools }}", FormatOptions(tool_parser=name))


@asynccontextmanager
async def served(mesh: FakeMesh, checker: ConstraintChecker | None = None) -> AsyncIterator[AsyncOpenAI]:
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    mesh.served = [ServedModel(MODEL, 4096, 1)]
    async with (
        serve_http(create_app(mesh, mesh.text, settings, checker=checker), settings) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        yield client


async def ask(client: AsyncOpenAI, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """The choices as they are in the end: message, finish reason, log-probabilities."""
    request = {"model": MODEL, "messages": HELLO, "tools": [F, G], **fields}
    if not stream:
        answer = await client.chat.completions.create(**request)
        return [choice.model_dump() for choice in answer.choices]
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index, {"message": {"content": None}, "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None
            message, delta = choice["message"], part.delta.model_dump(exclude_unset=True)
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key) is not None:
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["function"]["arguments"] == ""
                    calls.append(
                        {
                            "id": call["id"],
                            "type": call["type"],
                            "function": {"name": call["function"]["name"], "arguments": ""},
                        }
                    )
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if part.logprobs is not None:
                told = choice["logprobs"] or {"content": []}
                choice["logprobs"] = {"content": told["content"] + part.logprobs.model_dump()["content"]}
            choice["finish_reason"] = part.finish_reason
    return [choices[i] for i in sorted(choices)]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or ()
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
@pytest.mark.parametrize("name", sorted(ONE))
async def test_calls_of_every_format_arrive(name: str, tokens_per_delta: int, stream: bool) -> None:
    written = [ONE[name]("f", HARD), ONE[name]("g", "{}")]
    mesh = FakeMesh(native(name), tokens_per_delta=tokens_per_delta)
    mesh.answers = ["\n".join(written), f"Let me see: 世界.\n\n{written[1]}", "Nothing to call. <tool_ca"]
    async with served(mesh) as client:
        several, one, none = await ask(client, stream=stream, n=3)
    assert several["message"]["content"] is None
    assert calls_of(several) == [("f", HARD), ("g", "{}")]
    assert (one["message"]["content"], calls_of(one)) == ("Let me see: 世界.", [("g", "{}")])
    assert (none["message"]["content"], calls_of(none)) == ("Nothing to call. <tool_ca", [])
    assert [choice["finish_reason"] for choice in (several, one, none)] == ["tool_calls", "tool_calls", "stop"]
    ids = [call["id"] for choice in (several, one) for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3
    assert all(len(i) == 9 and i.isalnum() if name == "mistral" else i.startswith("call_") for i in ids)


async def test_the_stream_has_openais_shape() -> None:
    mesh = FakeMesh(
        model(), answer='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', tokens_per_delta=1000
    )
    async with served(mesh) as client, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        body = {"model": MODEL, "messages": HELLO, "tools": [F], "stream": True}
        events = (await http.post(f"{client.base_url}chat/completions", json=body)).text.split("\n\n")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    call_id = deltas[1]["delta"]["tool_calls"][0]["id"]
    first = {"index": 0, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}}
    assert [delta["delta"] for delta in deltas] == [
        {"role": "assistant", "content": None},
        {"tool_calls": [first]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {},
    ]
    assert deltas[-1]["finish_reason"] == "tool_calls"


async def test_the_packages_own_helper_puts_the_stream_together(checker: ConstraintChecker) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    mesh = FakeMesh(
        model(), answer='So.<tool_call>{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}</tool_call>'
    )
    tools = [pydantic_function_tool(Weather)]
    async with served(mesh, checker) as client:
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=tools) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        assert message.content == "So."
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.parsed_arguments == Weather(city="Köln", days=2)
        said = (await client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools)).choices[0].message
        assert said.tool_calls is not None
        back: list[Any] = [*HELLO, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}]
        again = await client.chat.completions.create(model=MODEL, messages=back, tools=tools)
        assert again.choices[0].finish_reason == "tool_calls"
    prompt = mesh.text.decode(mesh.prompts[-1].token_ids)
    assert 'So.\n<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


async def test_messages_of_the_packages_helpers_can_be_sent_back(checker: ConstraintChecker) -> None:
    """Their `parsed` and `parsed_arguments` were unknown parameters."""
    mesh = FakeMesh(model(), answer='So.<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    async with served(mesh, checker) as client:
        async with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=[G]) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        assert message.tool_calls is not None
        call = message.tool_calls[0]
        whole = message.model_dump()
        assert "parsed_arguments" in whole["tool_calls"][0]["function"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
        refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
        back: list[Any] = [*HELLO, whole, result, refused, *HELLO]
        again = await client.chat.completions.create(
            model=MODEL, messages=back, extra_body={"prompt_cache_retention": "in_memory"}
        )
        assert again.choices[0].message.content
    assert "No." in mesh.text.decode(mesh.prompts[-1].token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_separate_under_both_names(stream: bool) -> None:
    mesh = FakeMesh(model(THINKS), tokens_per_delta=3)
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    mesh.answers = ["\nParis, I think.\n</think>\n\nParis.", f"hm</think>{call}", "all of it"]
    async with served(mesh) as client:
        choices = await ask(client, stream=stream, n=3)
        plain = await ask(client, stream=stream, n=3, tools=package.omit)
    for found in (choices, plain):
        assert [choice["message"]["reasoning_content"] for choice in found] == ["Paris, I think.", "hm", "all of it"]
        assert [choice["message"]["reasoning"] for choice in found] == ["Paris, I think.", "hm", "all of it"]
    assert [choice["message"]["content"] for choice in choices] == ["Paris.", None, None]
    assert [choice["message"]["content"] for choice in plain] == ["Paris.", call, None]
    assert calls_of(choices[1]) == [("g", "{}")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_within_the_reasoning_is_a_call(stream: bool) -> None:
    mesh = FakeMesh(model(THINKS), tokens_per_delta=3)
    mesh.answers = [f'I call.\n<tool_call>\n{{"name": "g", "arguments": {{"s": "{"long " * 100}"}}}}\n</tool_call>']
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=stream)
        usage = (await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[G])).usage
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I call.", None)
    assert [name for name, _ in calls_of(choice)] == ["g"]
    assert choice["finish_reason"] == "tool_calls"
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens is not None
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens / 2


async def test_reasoning_can_be_switched_off_where_the_template_can() -> None:
    mesh = FakeMesh(model(THINKS), answer="Paris.")
    fields: dict[str, Any]
    async with served(mesh) as client:
        for fields in (
            {"reasoning_effort": "none"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        ):
            (choice,) = await ask(client, stream=False, **fields)
            assert choice["message"]["content"] == "Paris."
            assert "reasoning" not in choice["message"]
            assert mesh.text.decode(mesh.prompts[-1].token_ids).endswith("<think></think>")
        with pytest.raises(package.BadRequestError) as caught:
            await ask(client, stream=False, extra_body={"chat_template_kwargs": {"chat_template": "x"}})
        assert caught.value.param == "chat_template_kwargs.chat_template"
    assert len(mesh.prompts) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_ends_the_answer_and_the_work_when_no_more_are_wanted(stream: bool) -> None:
    mesh = FakeMesh(model(), answer=('<tool_call>{"name": "g", "arguments": {}}</tool_call>' + "\n") * 20)
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=stream, parallel_tool_calls=False)
        await mesh.until_idle()
    assert (calls_of(choice), choice["finish_reason"]) == ([("g", "{}")], "tool_calls")
    assert mesh.cancelled == 1
    assert mesh.deltas < 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off_is_marked(stream: bool) -> None:
    mesh = FakeMesh(model(), answer='<tool_call>{"name": "g", "arguments": {"a": "one two three"}}</tool_call>')
    limit = len(mesh.text._encode(mesh.answer.partition(" three")[0], add_special_tokens=False))
    async with served(mesh) as client:
        (cut,) = await ask(
            client,
            stream=stream,
            max_completion_tokens=limit,
        )
        (stopped,) = await ask(client, stream=stream, stop="two")
    assert (calls_of(cut), cut["finish_reason"]) == ([("g", '{"a": "one two')], "length")
    assert (calls_of(stopped), stopped["finish_reason"]) == ([("g", '{"a": "one ')], "stop")


@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_all_tokens(stream: bool, tokens_per_delta: int) -> None:
    mesh = FakeMesh(model(), tokens_per_delta=tokens_per_delta)
    mesh.answer = 'So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=stream, logprobs=True)
    ids = mesh.text._encode(mesh.answer, add_special_tokens=False)
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [logprobs_of(i, 0).logprob for i in ids]
    assert b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"]).decode() == mesh.answer


async def test_with_the_choice_none_text_is_text() -> None:
    mesh = FakeMesh(model(), answer='<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    async with served(mesh) as client:
        (choice,) = await ask(client, stream=False, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (mesh.answer, "stop")
    assert "You can call functions" not in mesh.text.decode(mesh.prompts[0].token_ids)


async def test_a_request_that_uses_none_of_it_is_not_taken_apart() -> None:
    assert await plan_answer(model(), Conversation(HELLO), [1], None) == AnswerPlan()


async def test_what_must_be_called_is_held_to_it(checker: ConstraintChecker) -> None:
    mesh = FakeMesh(model(), answer='<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    thinking = FakeMesh(model(THINKS), answer="hm</think>{}")

    async def rules(client: AsyncOpenAI, used: FakeMesh, **fields: Any) -> str | None:
        await ask(client, stream=False, **fields)
        constraint = used.prompts[-1].sampling.constraint
        return None if constraint is None else constraint.text

    async with served(mesh, checker) as client:
        assert await rules(client, mesh) is None
        required = await rules(client, mesh, tool_choice="required")
        assert required is not None
        assert "call: call_0 | call_1" in required
        assert "{0,31}" in required
        single = await rules(client, mesh, tool_choice="required", parallel_tool_calls=False)
        assert single is not None
        assert "{0,31}" not in single
        named = await rules(client, mesh, tool_choice=NAMED)
        assert named is not None
        assert "call: call_0\n" in named
        assert '\\"f\\"' not in named
        strict = await rules(client, mesh, tools=[STRICT, G])
        assert strict is not None
        assert "lead[lazy]" in strict
        either = await rules(client, mesh, response_format=SHAPE)
        assert either is not None
        assert "(answer | call" in either
        assert await rules(client, mesh, response_format=SHAPE, tool_choice="required") == required
    async with served(thinking, checker) as client:
        behind = await rules(client, thinking, response_format=SHAPE, tools=package.omit)
        assert behind is not None
        assert behind.endswith("start: thought SPACES answer")


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        (FormatOptions("template"), {}, "tools"),
        (None, {"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        (
            None,
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"if": {}}}}]},
            "tools[0].function.parameters",
        ),
        (
            None,
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (FormatOptions(tool_parser="json"), {"response_format": SHAPE}, "response_format.json_schema.schema"),
        (FormatOptions(tool_parser="pythonic"), {"tools": [STRICT]}, "tools"),
        (
            None,
            {"response_format": {**SHAPE, "json_schema": {"name": "s", "schema": {"if": {}}}}},
            "response_format.json_schema.schema",
        ),
        (None, {"extra_body": {"guided_regex": "("}}, "guided_regex"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    checker: ConstraintChecker, options: FormatOptions | None, fields: dict[str, Any], param: str
) -> None:
    told = options is not None and options.tool_parser
    mesh = FakeMesh(model(TEMPLATE + ("{{ tools }}" if told else ""), options or FormatOptions()))
    async with served(mesh, checker) as client:
        with pytest.raises(package.BadRequestError) as caught:
            await ask(client, stream=False, **fields)
    assert caught.value.param == param
    assert not mesh.prompts


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": SHAPE}])
async def test_a_tool_may_require_what_its_properties_do_not_describe(
    checker: ConstraintChecker, fields: dict[str, Any]
) -> None:
    """We closed such a schema to further properties, and then refused it as unsatisfiable."""
    parameters = {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    mesh = FakeMesh(model())
    async with served(mesh, checker) as client:
        await ask(client, stream=False, tools=tools, **fields)
    assert mesh.prompts[0].sampling.constraint is not None


async def test_a_required_tool_whose_schema_cannot_be_kept_is_named(checker: ConstraintChecker) -> None:
    """The refusal named neither the tool nor the property."""
    odd = {"type": "object", "properties": {"at": {"type": "string", "pattern": "(?=x)"}}}
    tools = [G, {"type": "function", "function": {"name": "get_weather", "parameters": odd}}]
    async with served(FakeMesh(model()), checker) as client:
        with pytest.raises(package.BadRequestError, match=r"Invalid 'tools': in the schema of 'get_weather', .*look-a"):
            await ask(client, stream=False, tools=tools, tool_choice="required")
