"""The Responses API, as the openai package reads it, over a frontend that stores no responses."""

import json
from collections.abc import AsyncIterator
from typing import Any, get_args

import httpx
import openai as package
import pytest
from fastapi.openapi.utils import get_openapi
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent

from components.errors import DecodeLost, NoDecodeInstance, QueueFull
from components.http.server import serve_http
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.openapi import UNUSED_SCHEMAS
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh, logprobs_of
from tests.services.frontend.thinking_model import CALL, TWO, thinking_model
from tests.waiting import PATIENCE_S

# clients are `Any`: what they answer is a union of thirty classes, of which a test looks at one
pytestmark = pytest.mark.anyio
ANSWER = "The capital of France is Paris."
URL = "/v1/responses"
HELLO: dict[str, Any] = {"model": MODEL, "input": "Hello"}
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def events_of(body: str) -> list[dict[str, Any]]:
    """Every event, each of which must be one that the openai package knows."""
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS[event["type"]].model_validate(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_string_is_answered(openai: Any, mesh: FakeMesh, text: TextModel) -> None:
    response = await openai.responses.create(model=MODEL, input="Hello", instructions="Be brief.")
    [prompt] = mesh.prompts
    assert text.decode(prompt.token_ids) == "system\nBe brief.\nuser\nHello\nassistant\n"
    assert prompt.sampling.max_tokens == CONTEXT - len(prompt.token_ids)
    assert response.output_text == ANSWER
    assert (response.id, response.object) == (f"resp_{prompt.request_id}", "response")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt.token_ids)
    assert response.usage.output_tokens == mesh.deltas
    assert response.usage.input_tokens_details.cached_tokens == 2
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


async def test_a_response_repeats_the_requests_parameters(http: httpx.AsyncClient) -> None:
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 400,
        "temperature": 0.25,
        "top_p": 0.5,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "store": False,
        "truncation": "disabled",
    }
    body = (await http.post(URL, json={**HELLO, **asked})).json()
    assert {name: body[name] for name in asked} == asked
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (body["tools"], body["tool_choice"], body["background"]) == ([], "auto", False)
    Response.model_validate(body, strict=True)


async def test_parameters_reach_the_mesh(openai: Any, mesh: FakeMesh) -> None:
    response = await openai.responses.create(
        model=MODEL, input="a", max_output_tokens=3, temperature=0, top_p=0.5, prompt_cache_key="session"
    )
    [prompt] = mesh.prompts
    sampling = prompt.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.0, 0.5)
    assert prompt.session == "session"
    assert (response.temperature, response.top_p) == (0.0, 0.5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


async def test_items_become_turns(openai: Any, mesh: FakeMesh, text: TextModel) -> None:
    first = await openai.responses.create(model=MODEL, input="Hello")
    said = [item.model_dump(exclude_unset=True) for item in first.output]
    await openai.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            *said,
            {"type": "message", "role": "user", "content": "And of Spain?"},
        ],
    )
    told = text.decode(mesh.prompts[1].token_ids)
    assert told == f"system\nBe brief.\nuser\nHello\nassistant\n{ANSWER}\nuser\nAnd of Spain?\nassistant\n"


async def test_the_stream_has_every_event_in_order(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    answer = await http.post(URL, json={**HELLO, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in deltas) == ANSWER
    assert len(deltas) > 3
    created, done, completed = events[0]["response"], events[-2]["item"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[2]["item"] == {**done, "status": "in_progress", "content": []}
    assert {event["item_id"] for event in deltas} == {done["id"]}
    assert completed["output"] == [done]
    whole = (await http.post(URL, json=HELLO)).json()
    differ = {name for name in whole if whole[name] != completed[name]}
    assert differ <= {"id", "created_at", "completed_at", "output"}
    assert whole["output"][0]["content"] == done["content"]


async def test_the_packages_own_stream_is_content(openai: Any, mesh: FakeMesh) -> None:
    mesh.answer = "a\u2028b 😀\x85東京"
    async with openai.responses.stream(model=MODEL, input="Hello") as stream:
        shown = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert shown == final.output_text == mesh.answer


@pytest.mark.parametrize("tokens_per_delta", [1, 3])
async def test_log_probabilities_of_the_text(openai: Any, mesh: FakeMesh, tokens_per_delta: int) -> None:
    mesh.answer, mesh.tokens_per_delta = "It is 東京.", tokens_per_delta
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await openai.responses.create(model=MODEL, input="Hello", **asked)
    told = whole.output[0].content[0].logprobs
    ids = mesh.text._encode(mesh.answer, add_special_tokens=False)
    assert [token.logprob for token in told] == [logprobs_of(i, 2).logprob for i in ids]
    assert b"".join(bytes(token.bytes) for token in told).decode() == mesh.answer
    assert all(len(token.top_logprobs) == 2 for token in told)
    streamed: list[float] = []
    async for event in await openai.responses.create(model=MODEL, input="Hello", stream=True, **asked):
        if event.type == "response.output_text.delta":
            streamed += [token.logprob for token in event.logprobs]
        if event.type == "response.completed":
            assert event.response.output[0].content[0].logprobs == told
    assert streamed == [token.logprob for token in told]


async def test_a_worker_lost_in_mid_stream_fails_the_response(
    http: httpx.AsyncClient, openai: Any, mesh: FakeMesh
) -> None:
    mesh.fail_at, mesh.failure = 2, DecodeLost("10.0.0.7 gone")
    answer = await http.post(URL, json={**HELLO, "stream": True})
    assert answer.status_code == 200
    *_, item, error, failed = events_of(answer.text)
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], error["code"]) == ("error", "server_error")
    assert answer.headers["x-request-id"] in error["message"]
    response = failed["response"]
    assert (failed["type"], response["status"], response["output"]) == ("response.failed", "failed", [item["item"]])
    assert response["error"] == {"code": "server_error", "message": error["message"]}
    assert "10.0.0.7" not in answer.text
    with pytest.raises(package.InternalServerError, match="lost"):
        await openai.responses.create(model=MODEL, input="Hello")


TOOLS: Any = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "g", "description": "d", "parameters": {"type": "object"}, "strict": False},
]


@pytest.fixture
async def thinker() -> AsyncIterator[tuple[AsyncOpenAI, FakeMesh]]:
    """A client of a model that reasons and calls tools."""
    mesh = FakeMesh(thinking_model(), served=[ServedModel(MODEL, 4096, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with (
        serve_http(create_app(mesh, mesh.text, settings), settings) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        yield client, mesh


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_text_and_calls_are_items(thinker: tuple[Any, FakeMesh], stream: bool) -> None:
    client, mesh = thinker
    mesh.answer = f"Hm, 東京.\n</think>\n\nLet me see.\n{TWO}"
    if stream:
        async with client.responses.stream(model=MODEL, input="Hello", tools=TOOLS) as opened:
            response = await opened.get_final_response()
    else:
        response = await client.responses.create(model=MODEL, input="Hello", tools=TOOLS)
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", "Hm, 東京.")
    assert (message.type, response.output_text.strip()) == ("message", "Let me see.")
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "f", {"a": 1}),
        ("function_call", "g", {"a": [2, 3]}),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert {item.status for item in response.output} == {"completed"}
    thought = mesh.text._encode(mesh.answer.partition("</think>")[0] + "</think>", add_special_tokens=False)
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_model_left_unfinished_is_incomplete(thinker: tuple[Any, FakeMesh], stream: bool) -> None:
    client, mesh = thinker
    mesh.answer = "</think>" + CALL.partition("1")[0]
    if stream:
        async with client.responses.stream(model=MODEL, input="Hello", tools=TOOLS) as opened:
            response = await opened.get_final_response()
    else:
        response = await client.responses.create(model=MODEL, input="Hello", tools=TOOLS)
    assert (response.status, response.output[-1].type) == ("completed", "function_call")
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [0, 3])
async def test_text_after_a_call_is_an_item_after_it(thinker: tuple[Any, FakeMesh], stream: bool, cut: int) -> None:
    """Without `stream`, all text was one item before the calls, and a whole call was incomplete in place of the text."""
    client, mesh = thinker
    mesh.answer = f"</think>First {CALL} and then"
    length = len(mesh.text._encode(mesh.answer, add_special_tokens=False))
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": length - cut,
    }
    if stream:
        events = [
            event async for event in await client.responses.create(model=MODEL, input="Hello", stream=True, **asked)
        ]
        response = events[-1].response
    else:
        response = await client.responses.create(model=MODEL, input="Hello", **asked)
    first, call, last = response.output
    assert (first.type, call.type, last.type) == ("message", "function_call", "message")
    assert (first.content[0].text.strip(), call.arguments) == ("First", '{"a": 1}')
    text = last.content[0].text
    assert text
    assert "and then".startswith(text.strip())
    assert (first.status, call.status, last.status) == ("completed", "completed", "incomplete" if cut else "completed")
    told = "".join(token.token for token in last.content[0].logprobs)
    assert told.endswith(text.strip()), "each token is told with its own text"
    assert "First" not in told


async def test_events_of_thoughts_and_calls(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    mesh.answer = f"Hm.\n</think>\n\nSee.\n{TWO}"
    create = client.responses.with_streaming_response.create
    async with create(model=MODEL, input="Hello", tools=TOOLS, stream=True) as answer:
        events = events_of((await answer.read()).decode())
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "created",
        "in_progress",
        *["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"],
        *["content_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta", "output_text.done"],
        *["content_part.done", "output_item.done"],
        *call,
        *call,
        "completed",
    ]
    for i, item in enumerate(events[-1]["response"]["output"]):
        mine = [event for event in events if event.get("output_index") == i]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in mine if "delta" in event) == whole
        assert all(event["item_id"] == item["id"] for event in mine if "item_id" in event)


async def test_what_a_tool_gave_goes_back(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    mesh.answer = f"Hm.</think>{CALL}"
    first = await client.responses.create(model=MODEL, input="Hello", tools=TOOLS)
    call = first.output[-1]
    given = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    said = [item.model_dump(exclude_unset=True) for item in first.output]
    await client.responses.create(model=MODEL, input=[{"role": "user", "content": "Hello"}, *said, given], tools=TOOLS)
    told = mesh.text.decode(mesh.prompts[1].token_ids)
    assert '"name": "f"' in told
    assert "tool\n42\n" in told
    with pytest.raises(package.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input=[{**given, "call_id": "nobody's"}], tools=TOOLS)
    assert refused.value.param == "input[0].call_id"
    assert "no 'function_call' before" in str(refused.value)


async def test_an_output_follows_its_call_if_messages_came_between(thinker: tuple[Any, FakeMesh]) -> None:
    """A user may write while a tool runs."""
    client, mesh = thinker
    calls = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ("one", "two")]
    outputs = [{"type": "function_call_output", "call_id": i, "output": f"of {i}"} for i in ("one", "two")]
    developer, user = ({"role": role, "content": f"by {role}"} for role in ("developer", "user"))
    hello = {"role": "user", "content": "Hello"}
    await client.responses.create(
        model=MODEL, input=[hello, *calls, developer, outputs[0], user, outputs[1]], tools=TOOLS
    )
    await client.responses.create(model=MODEL, input=[hello, *calls, *outputs, developer, user], tools=TOOLS)
    assert mesh.prompts[0].token_ids == mesh.prompts[1].token_ids


async def test_items_go_back_with_all_fields_that_the_package_knows(thinker: tuple[Any, FakeMesh]) -> None:
    """Fields that this server does not know are null in them, and were refused."""
    client, mesh = thinker
    mesh.answer = f"Hm.</think>See.{CALL}"
    first = await client.responses.create(model=MODEL, input="Hello", tools=TOOLS)
    hello, output = {"role": "user", "content": "Hello"}, {"type": "function_call_output", "output": "42"}
    for by_alias in (False, True):
        items = [item.model_dump(by_alias=by_alias) for item in first.output]
        given = {**output, "call_id": first.output[-1].call_id}
        await client.responses.create(model=MODEL, input=[hello, *items, given], tools=TOOLS)
    assert mesh.prompts[1].token_ids == mesh.prompts[2].token_ids
    with pytest.raises(package.BadRequestError, match=r"Unknown parameter: 'input\[0\].odd'"):
        await client.responses.create(model=MODEL, input=[{**hello, "odd": 1}])


CODEX: Any = [  # the tools of Codex, shortened
    {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "close"}]},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "web_search", "external_web_access": True},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        (
            "agents__close",
            '{"a": 1}',
            {"type": "function_call", "name": "close", "namespace": "agents", "arguments": '{"a": 1}'},
        ),
        (
            "apply_patch",
            '{"input": "*** é\\n"}',
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** é\n"},
        ),
        ("apply_patch", '{"in": 1}', {"type": "custom_tool_call", "name": "apply_patch", "input": ""}),
        ("other", "{}", {"type": "function_call", "name": "other", "arguments": "{}"}),
    ],
)
async def test_calls_of_namespaces_and_custom_tools_have_the_names_of_the_client(
    thinker: tuple[Any, FakeMesh], stream: bool, name: str, arguments: str, item: dict[str, Any]
) -> None:
    """Codex sends such tools with every request, and its first request was refused."""
    client, mesh = thinker
    mesh.answer = f'</think><tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    create = client.responses.with_streaming_response.create
    async with create(model=MODEL, input="Hello", tools=CODEX, stream=stream) as answer:
        body = (await answer.read()).decode()
    response = events_of(body)[-1]["response"] if stream else json.loads(body)
    [call] = response["output"]
    assert {key: value for key, value in call.items() if key not in {"id", "call_id", "status"}} == item
    assert [tool["type"] for tool in response["tools"]] == ["function", "namespace", "custom"]  # no search is offered
    told = mesh.text.decode(mesh.prompts[0].token_ids)
    assert "agents__close" in told
    assert "start: /.+/" in told
    assert "web_search" not in told
    if stream and "input" in item:
        deltas, done = (
            [event for event in events_of(body) if event["type"] == f"response.custom_tool_call_input.{kind}"]
            for kind in ("delta", "done")
        )
        assert "".join(event["delta"] for event in deltas) == done[0]["input"] == item["input"]
    output = {"type": item["type"] + "_output", "call_id": call["call_id"], "output": "42"}
    items = [{"role": "user", "content": "Hello"}, call, output]
    await client.responses.create(model=MODEL, input=items, tools=CODEX)
    told = mesh.text.decode(mesh.prompts[1].token_ids)
    assert f'"name": "{name}"' in told
    assert "tool\n42\n" in told


async def test_what_agents_send_beside_is_accepted(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    """Hints without effect, and reasoning of another server in a conversation that continues here, were refused."""
    plain = await http.post(URL, json=HELLO)
    beside = {
        "client_metadata": {"thread_id": "a", "nested": {"b": 1}},
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "detailed", "context": "all_turns"},
        "max_tool_calls": 3,
        "service_tier": "priority",
        "include": ["web_search_call.action.sources"],
        "tools": [
            {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": []}},
            {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
        ],
    }
    answer = await http.post(URL, json={**HELLO, **beside})
    assert (plain.status_code, answer.status_code) == (200, 200), answer.text
    assert mesh.prompts[0].token_ids == mesh.prompts[1].token_ids
    assert (answer.json()["service_tier"], answer.json()["tools"]) == ("default", [])
    assert answer.json()["max_tool_calls"] == 3


async def test_tools_that_would_be_loaded_later_are_offered_at_once(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": None}
    for later in ({}, {"defer_loading": True}):
        await client.responses.create(model=MODEL, input="Hello", tools=[{**tool, **later}, {"type": "tool_search"}])
    assert mesh.prompts[0].token_ids == mesh.prompts[1].token_ids


async def test_reasoning_of_another_server_is_its_summary(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    hello, well = ({"role": "user", "content": text} for text in ("Hello", "Well?"))
    said = {"role": "assistant", "content": "Hi."}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Greet."}]}
    for reasoning in ([thought], [{**thought, "encrypted_content": "gAAA"}]):
        await client.responses.create(model=MODEL, input=[hello, *reasoning, said, well])
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    for items in ([hello, hidden, said, well], [hello, said, well]):
        await client.responses.create(model=MODEL, input=items)
    one, same, hides, without = (prompt.token_ids for prompt in mesh.prompts)
    assert one == same
    assert hides == without


async def test_only_allowed_tools_are_offered(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    allowed = [{"type": "function", "name": "close", "namespace": "agents"}, {"type": "web_search"}]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    response = await client.responses.create(model=MODEL, input="Hello", tools=CODEX, tool_choice=choice)
    told = mesh.text.decode(mesh.prompts[0].token_ids)
    assert "agents__close" in told
    assert "exec_command" not in told
    assert response.tool_choice.to_dict() == choice


async def test_reasoning_is_switched(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    await client.responses.create(model=MODEL, input="Hello", reasoning={"effort": "none", "summary": "auto"})
    assert mesh.text.decode(mesh.prompts[0].token_ids).endswith("</think>")
    await client.responses.create(model=MODEL, input="Hello", reasoning={"effort": "high"})
    assert mesh.text.decode(mesh.prompts[1].token_ids).endswith("<think>\n")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_value"),
    ({"input": None}, "input", "invalid_value"),
    ({"input": 7}, "input", "invalid_value"),
    ({"input": ["a"]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "invalid_value"),
    ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood", "unknown_parameter"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"type": ["message"]}]}, "input[0].type", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
        "input[0].content[0].type",
        "unsupported_parameter",
    ),
    ({"input": [{"type": "reasoning", "encrypted_content": 7}]}, "input[0].encrypted_content", "invalid_value"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", None),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]}, "tools[0].tools[0].type", None),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f" * 62}]}]},
        "tools[0].tools[0].name",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]},
        "tools[0].tools[0].name",
        "invalid_value",
    ),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "ebnf"}}]}, "tools[0].format.type", None),
    ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}}, "tool_choice.mode", "invalid_value"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tools": [{"type": ["function"], "name": "f"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_parameter"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name", "missing_required_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "unsupported_parameter"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing_required_parameter"),
    ({"text": {"verbosity": "mute"}}, "text.verbosity", "invalid_value"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
    ({"reasoning": {"effort": "immense"}}, "reasoning.effort", None),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"include": ["file_search_call"]}, "include[0]", "invalid_value"),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 2}, "top_logprobs", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": CONTEXT}, "input", "context_length_exceeded"),
    ({"input": "word " * CONTEXT}, "input", "context_length_exceeded"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"stream_options": {}}, "stream_options", None),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "a"}}, "prompt", "unsupported_parameter"),
    ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
    ({"reasoning": {"context": "none"}}, "reasoning.context", "invalid_value"),
    ({"input": [{"type": "additional_tools", "tools": []}]}, "input[0].type", "unsupported_parameter"),
    ({"service_tier": "gold"}, "service_tier", "unsupported_parameter"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
    ({"background": True, "stream": True}, "stream", "unsupported_parameter"),
    ({"background": True, "store": False}, "store", None),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"messages": []}, "messages", "unknown_parameter"),
    # this frontend stores no responses
    ({"store": True}, "store", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
async def test_what_cannot_be_honoured_is_refused_by_name(
    refusing: tuple[httpx.AsyncClient, FakeMesh], fields: dict[str, Any], param: str, code: str | None
) -> None:
    http, mesh = refusing
    answer = await http.post(URL, json={**HELLO, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert param in error["message"] or code == "context_length_exceeded"
    if code is not None:
        assert error["code"] == code
    assert not mesh.prompts


OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "42"}
CALL_OF_A = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([OUTPUT, CALL_OF_A], "input[0].call_id"),
        ([CALL_OF_A, OUTPUT, OUTPUT], "input[2].call_id"),
        ([CALL_OF_A, OUTPUT, {"role": "user", "content": "a"}, OUTPUT], "input[3].call_id"),
    ],
)
async def test_an_output_without_its_call_is_refused(
    http: httpx.AsyncClient, items: list[dict[str, Any]], param: str
) -> None:
    error = (await http.post(URL, json={**HELLO, "input": items})).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (NoDecodeInstance("", retry_after_s=2), 503, "no_instance"),
        (QueueFull("", retry_after_s=2), 429, "rate_limit_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_has_its_status(
    http: httpx.AsyncClient, mesh: FakeMesh, failure: Exception, status: int, code: str, stream: bool
) -> None:
    mesh.fail_at, mesh.failure = 0, failure
    answer = await http.post(URL, json={**HELLO, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("path", ["", "/cancel", "/input_items"])
async def test_nothing_is_found_where_nothing_is_kept(http: httpx.AsyncClient, path: str) -> None:
    method = "POST" if path == "/cancel" else "GET"
    answer = await http.request(method, f"{URL}/resp_1{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert "stores no responses" in answer.json()["error"]["message"]


async def test_the_description_mixes_no_two_models(mesh: FakeMesh, settings: FrontendSettings) -> None:
    """What a body and an answer called alike was described as the body in both places."""
    app = create_app(mesh, mesh.text, settings)
    answers = get_openapi(title="", version="", routes=app.routes)["components"]["schemas"]
    described = app.openapi()["components"]["schemas"]
    names = answers.keys() - set(UNUSED_SCHEMAS)
    assert {name: described[name] for name in names} == {name: answers[name] for name in names}
    assert {"ResponseObject", "MessageObject", "ResponsesRequest", "MessagesRequest", "CountRequest"} < set(described)


async def test_input_tokens_are_counted_as_a_response_would_read_them(openai: Any, mesh: FakeMesh) -> None:
    asked = {"model": MODEL, "input": "Hello", "instructions": "Be brief."}
    counted = await openai.responses.input_tokens.count(**asked)
    assert (counted.object, mesh.prompts) == ("response.input_tokens", [])
    response = await openai.responses.create(**asked)
    assert counted.input_tokens == response.usage.input_tokens
    assert (await openai.responses.input_tokens.count(input="Hello", instructions="Be brief.")) == counted


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"model": "another"}, 404, "model"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, 400, "input[0].call_id"),
    ],
)
async def test_counting_input_tokens_refuses_by_its_own_names(
    http: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post(f"{URL}/input_tokens", json={**HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_clients_that_keep_encrypted_reasoning_get_its_text(http: httpx.AsyncClient, openai: Any) -> None:
    """Codex, and LiteLLM by default, ask for it with `store` false."""
    answer = await openai.responses.create(**HELLO, include=["reasoning.encrypted_content"], store=False)
    assert answer.output_text == ANSWER
    assert answer.output[0].content[0].logprobs in (None, [])
