"""What an agent sends back after a call, in all three dialects."""

from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import pytest

from components.http.server import serve_http
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.thinking_model import thinking_model
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

HELLO: Final = {"role": "user", "content": "Hello"}
PNG: Final = "data:image/png;base64,AA=="


@pytest.fixture
async def agent() -> AsyncIterator[tuple[httpx.AsyncClient, FakeMesh]]:
    """A client of a model that reasons and calls tools."""
    mesh = FakeMesh(thinking_model(), served=[ServedModel(MODEL, 4096, 1)])
    settings = FrontendSettings(port=0, drain_timeout_s=2)
    async with (
        serve_http(create_app(mesh, mesh.text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        yield http, mesh


def chat(result: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"model": MODEL, "messages": [HELLO, calling, {"role": "tool", "tool_call_id": "c", "content": result}]}


def response(result: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"model": MODEL, "input": [HELLO, call, {"type": "function_call_output", "call_id": "c", "output": result}]}


def message(result: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    turns = [{"role": "assistant", "content": [call]}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]})
    return {"model": MODEL, "max_tokens": 9, "messages": [HELLO, *turns]}


def beside_result(block: Any) -> dict[str, Any]:
    asked = message("So:")
    asked["messages"][2]["content"].append(block)
    return asked


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", chat([{"type": "text", "text": "So:"}, {"type": "image_url", "image_url": {"url": PNG}}])),
        ("responses", response([{"type": "input_text", "text": "So:"}, {"type": "input_image", "image_url": PNG}])),
        ("messages", message([{"type": "text", "text": "So:"}, {"type": "image", "source": {"type": "base64"}}])),
        ("messages", beside_result({"type": "image", "source": {"type": "base64"}})),
    ],
)
async def test_an_image_in_a_tools_result_becomes_a_text(
    agent: tuple[httpx.AsyncClient, FakeMesh], route: str, body: dict[str, Any]
) -> None:
    """An agent sends it with every later request of its session, and each was refused."""
    http, mesh = agent
    (await http.post(f"/v1/{route}", json=body)).raise_for_status()
    told = mesh.text.decode(mesh.prompts[0].token_ids)
    assert "tool\nSo:\n[image omitted: this model reads text only]\n" in told.replace("\nuser\n[", "\n[")


CALLS: Final = [("c", "1"), ("d", "2")]
BLOCKS: Final = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i, _ in CALLS]
RESULTS: Final = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in CALLS]
ITEMS: Final = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i, _ in CALLS]
OUTPUTS: Final = [{"type": "function_call_output", "call_id": i, "output": text} for i, text in CALLS]
FUNCTIONS: Final = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i, _ in CALLS]
ANSWERS: Final = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in CALLS]


@pytest.mark.parametrize(
    ("route", "turns"),
    [
        ("chat/completions", {"messages": [HELLO, {"role": "assistant", "tool_calls": FUNCTIONS}, *ANSWERS[::-1]]}),
        ("responses", {"input": [HELLO, *ITEMS, *OUTPUTS[::-1]]}),
        (
            "messages",
            {
                "max_tokens": 9,
                "messages": [
                    HELLO,
                    {"role": "assistant", "content": BLOCKS},
                    {"role": "user", "content": RESULTS[::-1]},
                ],
            },
        ),
    ],
)
async def test_results_are_in_the_order_of_their_calls(
    agent: tuple[httpx.AsyncClient, FakeMesh], route: str, turns: dict[str, Any]
) -> None:
    """Claude Code sends them in the order in which its tools ended. Templates without ids showed them under the wrong calls."""
    http, mesh = agent
    (await http.post(f"/v1/{route}", json={"model": MODEL, **turns})).raise_for_status()
    assert "\ntool\n1\ntool\n2\n" in mesh.text.decode(mesh.prompts[0].token_ids)


@pytest.mark.parametrize(
    ("route", "body", "at"),
    [
        ("chat/completions", chat([{"type": "video"}]), "messages[2].content[0].type"),
        ("chat/completions", chat([{"type": ["image"]}]), "messages[2].content[0].type"),
        ("responses", response([{"type": "computer_screenshot"}]), "input[2].output[0].type"),
        ("responses", response([7]), "input[2].output[0].type"),
        ("messages", message([{"type": "search_result"}]), "messages[2].content[0].content[0].type"),
        ("messages", message([{"type": {}}]), "messages[2].content[0].content[0].type"),
    ],
)
async def test_other_parts_of_a_tools_result_are_refused(
    agent: tuple[httpx.AsyncClient, FakeMesh], route: str, body: dict[str, Any], at: str
) -> None:
    http, _ = agent
    refused = await http.post(f"/v1/{route}", json=body)
    assert refused.status_code == 400
    assert f"'{at}'" in refused.json()["error"]["message"]
