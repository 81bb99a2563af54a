"""What clients ask an answer to be, on its way to the mesh; what cannot be kept, on its way back."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from components.http.server import serve_http
from components.structured import checker as checker_module
from components.structured.checker import open_checker
from components.structured.metrics import ConstraintMetrics
from components.text.tokenizer import TextModel
from components.wire.sampling import Constraint
from engine.model.mock_model import mock_dir
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.test_bad_inputs import CHAT, COMPLETION, error_of
from tests.services.frontend.test_request_spans import by_name
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
ANY_OBJECT = Constraint(kind="json_schema", text='{"type":"object"}')
OF_SCHEMA = Constraint(kind="json_schema", text=json.dumps(SCHEMA, separators=(",", ":")))
YES_NO = Constraint(kind="lark", text='start: CHOICE\nCHOICE: "yes" | "nö\\n"')
LARK = 'start: "a" B\nB: /[0-9]+/'


@pytest.fixture
def settings() -> FrontendSettings:
    return FrontendSettings(port=0, drain_timeout_s=2, max_body_bytes=2 * 1024 * 1024, compile_budget_s=0.5)


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(scope="module")
async def checker(tmp_path_factory: pytest.TempPathFactory, registry: CollectorRegistry) -> AsyncIterator[Any]:
    folder: Path = mock_dir(tmp_path_factory.mktemp("models"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(checker_module, "PATIENCE", 1000)  # CPU seconds are what a test spends
        async with open_checker(folder, 0.5, ConstraintMetrics(registry)) as opened:
            yield opened


@pytest.fixture
async def url(mesh: FakeMesh, text: TextModel, settings: FrontendSettings, checker: Any) -> AsyncIterator[str]:
    async with serve_http(create_app(mesh, text, settings, checker=checker), settings) as listening:
        yield listening


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": NAMED}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": r"\d+"}}, Constraint(kind="regex", text=r"\d+")),
        ({"structured_outputs": {"choice": ["yes", "nö\n"]}}, YES_NO),
        ({"structured_outputs": {"grammar": LARK}}, Constraint(kind="lark", text=LARK)),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": r"\d+"}, Constraint(kind="regex", text=r"\d+")),
        ({"guided_choice": ["yes", "nö\n"]}, YES_NO),
        ({"guided_choice": ["a\x7fb"]}, Constraint(kind="lark", text='start: CHOICE\nCHOICE: "a\\u007fb"')),
        ({"guided_grammar": LARK}, Constraint(kind="lark", text=LARK)),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Constraint(kind="regex", text="a")),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_what_is_asked_for_reaches_the_mesh(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str, fields: dict[str, Any], constraint: Constraint | None
) -> None:
    body = {**HELLO, **fields} if path == CHAT else {"model": MODEL, "prompt": "Hello", **fields}
    answer = await http.post(path, json=body)
    assert answer.is_success, answer.text
    assert mesh.prompts[0].sampling.constraint == constraint


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", ""),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required with type 'json_schema'",
        ),
        (
            {"response_format": {**NAMED, "type": "json_object"}},
            "response_format.json_schema",
            "is required with type 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
            "'uniqueItems' is not supported",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of its fields"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of its fields"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Unknown"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "one of them"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"guided_regex": "a", "response_format": NAMED}, "guided_regex", "one of them"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "one of them"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": '{"a": 1e999}'}, "guided_json", "not valid JSON"),
        ({"guided_json": '"text"'}, "guided_json", "must be an object"),
        ({"guided_json": {"type": "x" * 300_000}}, "guided_json", "at most 262144"),
        ({"guided_json": {"enum": ["x" * 20] * 20_000}}, "guided_json", "at most 262144"),
        # the bug: the text was parsed before its length was checked
        ({"guided_json": '{"enum": [' + "0," * 140_000}, "guided_json", "at most 262144"),
        ({"guided_json": '{"enum": [' + "0, " * 30_000 + "1" * 500 + "]}"}, "guided_json", "more than 400 digits"),
        ({"guided_regex": ""}, "guided_regex", ""),
        ({"guided_regex": "a" * 20_000}, "guided_regex", ""),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_choice": "yes"}, "guided_choice", ""),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", ""),
        ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "Unknown"),
    ],
    ids=str,
)
async def test_what_cannot_be_kept_is_refused_by_the_name_of_its_field(
    http: httpx.AsyncClient, mesh: FakeMesh, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = await http.post(CHAT, json={**HELLO, **fields})
    assert said in error_of(answer, 400, answer.json()["error"]["code"], param)
    assert not mesh.prompts


async def test_deep_nesting_is_refused_by_whoever_meets_it_first(http: httpx.AsyncClient) -> None:
    for depth in (60, 150, 100_000):
        body = json.dumps({**HELLO, "guided_json": 0}).replace("0}", '{"items":' * depth + "{}" + "}" * depth + "}")
        answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == (200 if depth < 100 else 400), answer.text


async def test_a_bomb_is_refused_within_its_budget_while_others_are_answered(
    http: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    assert (await http.post(CHAT, json={**HELLO, "guided_regex": "warm"})).is_success
    bomb = asyncio.create_task(
        http.post(CHAT, json={**HELLO, "guided_json": {"type": "integer", "multipleOf": 999_983}})
    )
    took: list[float] = []
    while not bomb.done():
        before = time.process_time()
        assert (await http.post(CHAT, json=HELLO)).is_success
        took.append(time.process_time() - before)
    assert "too complex" in error_of(await bomb, 400, "invalid_value", "guided_json"), "in 10 s it would compile"
    assert len(took) > 10
    assert sorted(took)[len(took) // 2] < 0.25
    refused = registry.get_sample_value("kvmesh_structured_output_requests_total", {"result": "refused"})
    assert refused is not None
    assert refused >= 1


async def test_callers_flood_themselves_alone_and_whoever_leaves_is_not_worked_for(
    mesh: FakeMesh,
    text: TextModel,
    settings: FrontendSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks of clients that had left continued, and one caller's could keep all others waiting."""
    monkeypatch.setattr(checker_module, "MAX_WAITING_OF_A_CALLER", 3)

    async def ask(name: str, **fields: Any) -> httpx.Response:
        keyed = {} if name == "anonymous" else {"authorization": f"Bearer {name}"}
        return await client.post(CHAT, json={**HELLO, **fields}, headers=keyed)

    async with (
        open_checker(mock_dir(tmp_path), 300.0, ConstraintMetrics(CollectorRegistry())) as opened,
        serve_http(create_app(mesh, text, settings, checker=opened), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for name in ("one", "anonymous"):
            bombs = [
                asyncio.create_task(ask(name, guided_json={"type": "integer", "multipleOf": 999_983 - 2 * i}))
                for i in range(3)
            ]
            await until(lambda: sum(len(caller.checks) for caller in opened._callers.values()) == 3)
            refused = await ask(name, guided_regex="one more")
            assert "expressions" in error_of(refused, 429, "rate_limit_exceeded", None)
            assert refused.headers["retry-after"] == "1"
            assert (await ask("another", guided_regex=f"not {name}")).is_success
            assert not any(bomb.done() for bomb in bombs)
            for bomb in bombs:
                bomb.cancel()
            await until(lambda: not opened._callers)
            assert (await ask(name, guided_regex=f"now {name}")).is_success


async def test_the_check_is_a_span_of_the_request(http: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    await http.post(CHAT, json={**HELLO, "response_format": {"type": "json_object"}, "max_tokens": 2})
    assert "frontend.compile" in by_name(spans)


async def test_without_a_checker_nobody_is_promised_anything(
    mesh: FakeMesh, text: TextModel, settings: FrontendSettings
) -> None:
    async with (
        serve_http(create_app(mesh, text, settings), settings) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        answer = await client.post(CHAT, json={**HELLO, "guided_regex": "a"})
        error_of(answer, 400, None, "guided_regex")
        assert not mesh.prompts
