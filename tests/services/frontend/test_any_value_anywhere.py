"""Whatever stands anywhere in a body, the answer is no 5xx."""

from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from components.structured.checker import open_checker
from components.structured.metrics import ConstraintMetrics
from engine.model.mock_model import mock_dir
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.thinking_model import thinking_model

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"]}}, "required": ["a"]}
FUNCTION: dict[str, Any] = {"name": "f", "description": "It does.", "parameters": SCHEMA, "strict": False}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "a", "name": "u"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "b", "tool_call_id": "c1"},
        ],
        "max_tokens": 2,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "/v1/chat/completions#json": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    "/v1/completions": {"prompt": [[5, 6]], "max_tokens": 2, "guided_choice": ["a", "b"], "stop_token_ids": [3]},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "b"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        ],
        "max_output_tokens": 16,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
    },
    "/v1/responses#tools": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": "e"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "c", "input": "i"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "b"},
            {"type": "function_call", "call_id": "c2", "namespace": "n", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "b"},
        ],
        "max_output_tokens": 16,
        "tools": [
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]},
            {
                "type": "custom",
                "name": "c",
                "description": "d",
                "format": {"type": "grammar", "syntax": "lark", "definition": "g"},
            },
            {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f", "namespace": "n"}, {"type": "web_search"}],
        },
        "client_metadata": {"a": "b"},
    },
    "/v1/messages": {
        "max_tokens": 16,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "b"},
                ],
            },
        ],
        "tools": [{"type": "custom", "name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "metadata": {"user_id": "u"},
    },
    "/v1/embeddings": {"input": [[5, 6]], "encoding_format": "base64", "dimensions": 4},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True},
    "/detokenize": {"tokens": [5, 6]},
}
VALUES: list[Any] = [None, True, -1, 1.5, "", "x", [], ["x"], [[]], [{}], {}, {"type": []}, {"x": {}}]


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """To everything in `value`."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from paths(item, (*path, key))


def changed(body: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    copy: Any = deepcopy(body)
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return {"model": MODEL, **copy}


@pytest.fixture(scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model that reasons and calls tools."""
    folder, metrics = mock_dir(tmp_path_factory.mktemp("models")), ConstraintMetrics(CollectorRegistry())
    mesh = FakeMesh(thinking_model(), served=[ServedModel(MODEL, 4096, 1)])
    async with open_checker(folder, 2.0, metrics) as checker:
        app = create_app(mesh, mesh.text, FrontendSettings(), checker=checker)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            yield client


@pytest.mark.parametrize("route", BODIES)
async def test_no_value_anywhere_brings_a_5xx(http: httpx.AsyncClient, route: str) -> None:
    body, seen = BODIES[route], set[int]()
    answer = await http.post(route.partition("#")[0], json={"model": MODEL, **body})
    assert answer.status_code == (400 if route == "/v1/embeddings" else 200), answer.text
    for path in paths(body):
        for value in VALUES:
            answer = await http.post(route.partition("#")[0], json=changed(body, path, value))
            assert answer.status_code < 500, (path, value, answer.text)
            seen.add(answer.status_code)
    assert 400 in seen
