"""The Messages API, as the anthropic package reads it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, get_args

import anthropic as package
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from components.errors import DecodeLost, InvariantBroken, NoDecodeInstance, QueueFull
from components.http.server import serve_http
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh
from tests.services.frontend.test_operations import value_of
from tests.services.frontend.thinking_model import CALL, TWO, thinking_model
from tests.waiting import PATIENCE_S

# clients are `Any`: what they answer is a union of thirty classes, of which a test looks at one
pytestmark = pytest.mark.anyio
ANSWER = "The capital of France is Paris."
URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Hello"}]}
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(RawMessageStreamEvent)[0])
}
TOOLS: list[dict[str, Any]] = [
    {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"name": "g", "input_schema": {"type": "object"}},
]


@pytest.fixture
async def anthropic(url: str) -> AsyncIterator[AsyncAnthropic]:
    """The package as users have it, retries off."""
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def thinker() -> AsyncIterator[tuple[AsyncAnthropic, FakeMesh]]:
    """A client of a model that reasons and calls tools."""
    mesh = FakeMesh(thinking_model(), served=[ServedModel(MODEL, 4096, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with (
        serve_http(create_app(mesh, mesh.text, settings), settings) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        yield client, mesh


def events_of(body: str) -> list[dict[str, Any]]:
    """Every event, each of which must be one that the anthropic package knows."""
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            ErrorResponse.model_validate(event)
        elif event["type"] != "ping":
            EVENTS[event["type"]].model_validate(event)
        events.append(event)
    return events


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    told = answer.json()
    if kind != "request_too_large":  # documented, though the package has no class for it
        ErrorResponse.model_validate(told)
    assert set(told) == {"type", "error", "request_id"}
    assert told["error"]["type"] == kind
    assert answer.headers["x-request-id"] in told["request_id"]
    assert answer.headers["request-id"] == told["request_id"]
    return str(told["error"]["message"])


async def test_a_message_is_answered(anthropic: Any, mesh: FakeMesh, text: TextModel) -> None:
    message = await anthropic.messages.create(**HELLO, system="Be brief.", metadata={"user_id": "u"})
    [prompt] = mesh.prompts
    assert text.decode(prompt.token_ids) == "system\nBe brief.\nuser\nHello\nassistant\n"
    assert (prompt.sampling.max_tokens, prompt.session) == (200, "u")
    assert (message.id, message.type, message.role, message.model) == (
        f"msg_{prompt.request_id}",
        "message",
        "assistant",
        MODEL,
    )
    assert [(block.type, block.text) for block in message.content] == [("text", ANSWER)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.input_tokens == len(prompt.token_ids) - 2
    assert message.usage.output_tokens == mesh.deltas
    assert message._request_id == f"req_{prompt.request_id}"


async def test_models_have_the_fields_of_anthropics_api(anthropic: Any) -> None:
    page = await anthropic.models.list()
    [model] = page.data
    assert (model.id, model.type, model.display_name, model.created_at.year) == (MODEL, "model", MODEL, 2023)
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
    assert await anthropic.models.retrieve(MODEL) == model


async def test_parameters_reach_the_mesh(anthropic: Any, mesh: FakeMesh) -> None:
    message = await anthropic.messages.create(
        **{**HELLO, "max_tokens": 3},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.75, "top_k": 40},
    )
    sampling = mesh.prompts[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 0.5, 0.75, 40)
    assert message.stop_reason == "max_tokens"


async def test_turns_of_one_role_are_one(anthropic: Any, mesh: FakeMesh, text: TextModel) -> None:
    await anthropic.messages.create(
        model=MODEL,
        max_tokens=5,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ],
    )
    told = text.decode(mesh.prompts[0].token_ids)
    assert told == "system\nBe brief.\nuser\none\ntwo\nassistant\nthree\nuser\nfour\nassistant\n"


async def test_the_stream_has_every_event_in_order(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    answer = await http.post(URL, json={**HELLO, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in deltas) == ANSWER
    assert len(deltas) > 3
    start, last = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len(mesh.prompts[0].token_ids) - 2
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == mesh.deltas


async def test_the_packages_own_stream_is_content(anthropic: Any, mesh: FakeMesh) -> None:
    mesh.answer = "a\u2028b 😀\x85東京"
    async with anthropic.messages.stream(**HELLO) as stream:
        shown = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert shown == final.content[0].text == mesh.answer
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_matched_stop_sequence_is_reported(anthropic: Any, mesh: FakeMesh, stream: bool) -> None:
    request = {**HELLO, "stop_sequences": ["never", "e is"]}
    if stream:
        async with anthropic.messages.stream(**request) as opened:
            message = await opened.get_final_message()
    else:
        message = await anthropic.messages.create(**request)
    assert message.content[0].text == "The capital of Franc"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e is")
    await mesh.until_idle()
    assert mesh.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_text_and_calls_are_blocks(thinker: tuple[Any, FakeMesh], stream: bool) -> None:
    client, mesh = thinker
    mesh.answer = f"Hm, 東京.\n</think>\n\nLet me see.\n{TWO}"
    request = {**HELLO, "max_tokens": 400, "tools": TOOLS}
    if stream:
        async with client.messages.stream(**request) as opened:
            message = await opened.get_final_message()
    else:
        message = await client.messages.create(**request)
    Message.model_validate(message.model_dump())
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "Hm, 東京.")
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "f", {"a": 1}),
        ("tool_use", "g", {"a": [2, 3]}),
    ]
    assert len({call.id for call in calls}) == 2
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_text_after_a_call_is_a_block_after_it(thinker: tuple[Any, FakeMesh], stream: bool) -> None:
    """Without `stream`, all text was one block before the calls."""
    client, mesh = thinker
    mesh.answer = f"</think>First {CALL} then {CALL} last"
    if stream:
        async with client.messages.stream(**HELLO, tools=TOOLS) as opened:
            message = await opened.get_final_message()
    else:
        message = await client.messages.create(**HELLO, tools=TOOLS)
    shown = [block.text.strip() if block.type == "text" else block.input for block in message.content]
    assert shown == ["First", {"a": 1}, "then", {"a": 1}, "last"]


async def test_blocks_of_a_stream_do_not_overlap(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    mesh.answer = f"Hm.\n</think>\n\nSee.\n{TWO}"
    async with client.messages.with_streaming_response.create(
        **{**HELLO, "max_tokens": 400}, tools=TOOLS, stream=True
    ) as answer:
        events = events_of((await answer.read()).decode())
    blocks = [e for e in events if e["type"].startswith("content_block")]
    seen = [(e["type"].removeprefix("content_block_"), e["index"]) for e in blocks]
    expected = [(what, i) for i in range(4) for what in ("start", "delta", "stop")]
    assert [pair for i, pair in enumerate(seen) if i == 0 or pair != seen[i - 1]] == expected
    assert blocks[-3]["delta"]["type"] == "input_json_delta"


async def test_a_call_cut_off_has_the_input_that_is_there(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    mesh.answer = "</think>" + CALL.replace("1", '"a long word", "b": 2')
    cut = len(mesh.text._encode(mesh.answer.partition("word")[0], add_special_tokens=False))
    message = await client.messages.create(**{**HELLO, "max_tokens": cut}, tools=TOOLS)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content if block.type == "tool_use"] in (
        [{}],
        [{"a": "a long "}],
        [{"a": "a long"}],
    )


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({}, 2),
        ({"disable_parallel_tool_use": None}, 2),
        ({"disable_parallel_tool_use": False}, 2),
        ({"disable_parallel_tool_use": True}, 1),
    ],
)
async def test_a_second_call_ends_the_answer_only_if_parallel_calls_are_disabled(
    thinker: tuple[Any, FakeMesh], choice: dict[str, Any], calls: int
) -> None:
    client, mesh = thinker
    mesh.answer = f"</think>{CALL}{CALL}"
    message = await client.messages.create(**HELLO, tools=TOOLS, tool_choice={"type": "auto", **choice})
    assert [block.type for block in message.content].count("tool_use") == calls


async def test_consecutive_messages_of_a_role_are_one_turn_also_for_tool_results(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {"a": 1}} for name in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name * 3} for name in ("a", "b")]
    turns = [*HELLO["messages"], *({"role": "assistant", "content": [use]} for use in uses)]
    turns += [*user(results[0]), *user(results[1], {"type": "text", "text": "Well?"})]
    await client.messages.create(**{**HELLO, "messages": turns}, tools=TOOLS)
    told = mesh.text.decode(mesh.prompts[0].token_ids)
    assert "tool\naaa\n" in told
    assert "tool\nbbb\nuser\nWell?\n" in told


async def test_tools_and_what_they_gave_reach_the_template(thinker: tuple[Any, FakeMesh]) -> None:
    client, mesh = thinker
    mesh.answer = f"</think>{CALL}"
    first = await client.messages.create(**HELLO, tools=TOOLS)
    [use] = first.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "42", "is_error": True}
    await client.messages.create(
        model=MODEL,
        max_tokens=20,
        tools=TOOLS,
        messages=[
            *HELLO["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ],
    )
    told = mesh.text.decode(mesh.prompts[1].token_ids)
    assert "tool\nError:\n42\nuser\nWell?\n" in told
    assert '"name": "f"' in told


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "medium"}}, True),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, True),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, False),
    ],
)
async def test_thinking_is_switched(fields: dict[str, Any], thinks: bool) -> None:
    mesh = FakeMesh(thinking_model(), served=[ServedModel(MODEL, 4096, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with (
        serve_http(create_app(mesh, mesh.text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        assert (await http.post(URL, json={**HELLO, **fields})).is_success
    assert mesh.text.decode(mesh.prompts[0].token_ids).endswith("<think>\n") == thinks


async def test_effort_and_thinking_are_guidance(anthropic: Any, mesh: FakeMesh) -> None:
    """Claude Code sends them with every request, and was refused by every model whose reasoning cannot be set."""
    mesh.served = [ServedModel(MODEL, 4096, 1)]
    for fields in (
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
        {"output_config": {"effort": "high"}},
    ):
        await anthropic.messages.create(**{**HELLO, **fields})
    await anthropic.messages.create(**HELLO)
    assert len({tuple(prompt.token_ids) for prompt in mesh.prompts}) == 1


async def test_what_exceeds_the_context_is_refused_in_the_words_that_claude_code_reads(http: httpx.AsyncClient) -> None:
    """It sends `max_tokens` 32000. It did not understand the refusal, so a model with that context was of no use."""
    refused = await http.post(URL, json={**HELLO, "max_tokens": 32000})
    assert re.search(rf"input length and `max_tokens` exceed context limit: \d+ \+ 32000 > {CONTEXT}", refused.text)
    long = {"role": "user", "content": "word " * CONTEXT}
    refused = await http.post(URL, json={**HELLO, "messages": [long]})
    assert re.search(rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum", refused.text)


@pytest.mark.parametrize("stream", [True, False])
async def test_edits_of_the_context_are_not_applied_and_the_answer_says_so(
    http: httpx.AsyncClient, stream: bool
) -> None:
    """Claude Code sends `context_management` with every request, and was refused."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    asked = {**HELLO, "stream": stream, "context_management": {"edits": edits}}
    answer = (await http.post(URL, json=asked)).raise_for_status()
    last = events_of(answer.text)[-2] if stream else answer.json()
    assert last["context_management"] == {"applied_edits": []}
    without = await http.post(URL, json={**HELLO, "stream": stream})
    assert "context_management" not in without.text


async def test_tokens_are_counted_as_they_would_be_generated_from(anthropic: Any, mesh: FakeMesh) -> None:
    asked = {"model": MODEL, "messages": HELLO["messages"], "system": "Be brief."}
    counted = await anthropic.messages.count_tokens(**asked)
    assert not mesh.prompts
    await anthropic.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == len(mesh.prompts[0].token_ids)
    assert counted._request_id.startswith("req_")


async def test_a_conversation_that_ends_with_the_assistants_turn_is_counted_and_not_continued(
    http: httpx.AsyncClient,
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}, "toolset_name": None}
    messages = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Hi."}, call]}]
    counted = await http.post(COUNT, json={"model": MODEL, "messages": messages})
    assert (counted.status_code, counted.json()["input_tokens"] > 0) == (200, True)
    refused = await http.post(URL, json={"model": MODEL, "messages": messages, "max_tokens": 5})
    assert refused.status_code == 400
    assert "cannot continue" in refused.text


async def test_counting_is_counted_and_traced(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    asked = {"model": MODEL, "messages": HELLO["messages"]}
    answer = await http.post(COUNT, json=asked, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    refused = await http.post(COUNT, json={**asked, "model": "nobody"})
    assert refused.status_code == 404
    assert refused.json()["request_id"] == f"req_{refused.headers['x-request-id']}" == refused.headers["request-id"]
    for model, status in ((MODEL, 200), ("", 404)):
        assert (
            await value_of(http, f'kvmesh_requests_total{{model_name="{model}",route="{COUNT}",status="{status}"}}')
            == 1
        )
    told, untold = (span for span in spans.get_finished_spans() if span.name == "count_tokens")
    assert [span.status.status_code for span in (told, untold)] == [StatusCode.UNSET, StatusCode.UNSET]
    assert ["kvmesh.refused" in (span.attributes or {}) for span in (told, untold)] == [False, True]


async def test_counting_ends_when_its_time_is_over(
    mesh: FakeMesh, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> list[int]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(TextModel, "encode_chat", never)
    settings = FrontendSettings(port=0, request_timeout_s=0.01)
    transport = httpx.ASGITransport(create_app(mesh, text, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http, asyncio.timeout(PATIENCE_S):
        answer = await http.post(COUNT, json={"model": MODEL, "messages": HELLO["messages"]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


async def test_counting_blames_fields_by_their_names_here(http: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "messages": HELLO["messages"], "output_config": {"effort": "immense"}}
    for url in (COUNT, URL):
        answer = await http.post(url, json=asked if url == COUNT else {**asked, "max_tokens": 1})
        assert answer.status_code == 400
        assert "output_config.effort" in answer.json()["error"]["message"]


async def test_a_worker_lost_in_mid_stream_is_an_error_event(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 2, DecodeLost("10.0.0.7 gone")
    answer = await http.post(URL, json={**HELLO, "stream": True})
    assert answer.status_code == 200
    error = events_of(answer.text)[-1]
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == f"req_{answer.headers['x-request-id']}"
    assert "10.0.0.7" not in answer.text


async def test_the_package_raises_what_breaks_a_stream(anthropic: Any, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 2, DecodeLost("gone")
    with pytest.raises(package.APIStatusError, match="lost"):
        async with anthropic.messages.stream(**HELLO) as stream:
            await stream.get_final_message()


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "42"}


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT}, f"maximum context length is {CONTEXT}"),
    ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "prompt is too long"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
    ({"messages": user()}, "messages[0].content"),
    (
        {"messages": user({"type": "image", "source": {"type": "url", "url": "http://x"}})},
        "messages[0].content[0].type",
    ),
    ({"messages": user({"type": "document"})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "text", "text": 7})}, "messages[0].content[0].text"),
    ({"messages": user({"type": "text", "text": "a", "x": 1})}, "messages[0].content[0].x"),
    ({"messages": user({"type": "tool_result", "tool_use_id": "a"})}, "messages[0].content[0].tool_use_id"),
    ({"messages": user({"type": "text", "text": "a"}, RESULT)}, "messages[0].content[1]"),
    ({"messages": [*user({"type": "text", "text": "a"}), *user(RESULT)]}, "messages[1].content[0]"),
    ({"messages": user({"type": "tool_use", "id": "a", "name": "f", "input": {}})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "thinking", "thinking": "a"})}, "messages[0].content[0].type"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": [{"type": ["text"], "text": "a"}]}, "system[0].type"),
    ({"tools": [{"type": {}, "name": "f", "input_schema": {}}]}, "tools[0].type"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": -0.1}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": list("abcde")}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"context_management": {"edits": [7]}}, "context_management.edits[0]"),
    ({"context_management": {"trigger": 7}}, "context_management.trigger"),
    ({"output_config": {"effort": "immense"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "'output_config.format' is not supported"),
    ({"container": "a"}, "container"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"n": 2}, "'n'"),
]


@pytest.mark.parametrize(("fields", "told"), BAD)
async def test_what_cannot_be_honoured_is_refused_by_name(
    refusing: tuple[httpx.AsyncClient, FakeMesh], fields: dict[str, Any], told: str
) -> None:
    http, mesh = refusing
    assert told in error_of(await http.post(URL, json={**HELLO, **fields}), 400, "invalid_request_error")
    assert not mesh.prompts


async def test_a_refusal_says_that_there_are_no_images_and_no_tools_of_the_server(http: httpx.AsyncClient) -> None:
    """Claude Code shows this to its user: it said only which types are accepted."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused = await http.post(URL, json={**HELLO, "messages": user(image)})
    assert "images and documents are not supported" in error_of(refused, 400, "invalid_request_error")
    search = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    refused = await http.post(URL, json={**HELLO, "tools": search})
    assert "this server runs no tools itself" in error_of(refused, 400, "invalid_request_error")


async def test_redacted_thinking_of_another_server_is_left_out(anthropic: Any, mesh: FakeMesh) -> None:
    """A conversation that began with another server could not continue here."""
    [hello] = HELLO["messages"]
    hidden = {"type": "redacted_thinking", "data": "EmwK"}
    said = {"type": "text", "text": "Hi."}
    for content in ([hidden, said], [said]):
        turns = [hello, {"role": "assistant", "content": content}, hello]
        await anthropic.messages.create(**{**HELLO, "messages": turns})
    await anthropic.messages.create(**{**HELLO, "messages": [hello, {"role": "assistant", "content": [hidden]}, hello]})
    assert mesh.prompts[0].token_ids == mesh.prompts[1].token_ids


async def test_a_thread_is_refused_so_that_clients_send_the_conversation_without_it(http: httpx.AsyncClient) -> None:
    """Each call of `tool_runner` failed: it uses a thread, and continues without one only after this error code."""
    refused = await http.post(URL, json={**HELLO, "thread": {"type": "create"}})
    error_of(refused, 400, "invalid_request_error")
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("path", [URL, COUNT])
async def test_an_invalid_request_gets_an_error_of_anthropics_shape(http: httpx.AsyncClient, path: str) -> None:
    json_type = {"content-type": "application/json"}
    error_of(await http.post(path, content=b"{", headers=json_type), 400, "invalid_request_error")
    error_of(await http.post(path, content=b"{}"), 415, "invalid_request_error")
    error_of(await http.post(path, content=b" " * 70_000, headers=json_type), 413, "request_too_large")
    error_of(await http.get(path), 405, "invalid_request_error")
    body = {**HELLO, "model": "nobody"}
    body = {name: body[name] for name in ("model", "messages")} if path == COUNT else body
    assert "nobody" in error_of(await http.post(path, json=body), 404, "not_found_error")


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (NoDecodeInstance("", retry_after_s=2), 529, "overloaded_error"),
        (QueueFull("", retry_after_s=2), 429, "rate_limit_error"),
        (InvariantBroken("secret"), 500, "api_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_has_its_status(
    http: httpx.AsyncClient, mesh: FakeMesh, failure: Exception, status: int, kind: str, stream: bool
) -> None:
    mesh.fail_at, mesh.failure = 0, failure
    answer = await http.post(URL, json={**HELLO, "stream": stream})
    assert "secret" not in error_of(answer, status, kind)
    if status in {429, 529}:
        assert answer.headers["retry-after"] == "2"


async def test_errors_arrive_as_the_clients_own_classes(anthropic: Any, mesh: FakeMesh) -> None:
    with pytest.raises(package.NotFoundError):
        await anthropic.messages.create(**{**HELLO, "model": "nobody"})
    with pytest.raises(package.BadRequestError, match="temperature"):
        await anthropic.messages.create(**HELLO, extra_body={"temperature": 9})
    mesh.served.clear()
    with pytest.raises(package.InternalServerError) as raised:
        await anthropic.messages.create(**HELLO)
    assert raised.value.status_code == 529
