"""Health, metrics, the API description."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.discovery.registry import Registration
from components.errors import DecodeLost
from engine.model.mock_model import END, SPECIAL
from services.frontend.__main__ import load_text
from services.frontend.config import FrontendSettings
from services.frontend.connections import tokens_subject
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


async def value_of(http: httpx.AsyncClient, series: str) -> float:
    text = (await http.get("/metrics")).text
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, f"{series} not in\n{text}"
    return float(found[1])


async def test_health_names_the_models(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    assert (await http.get("/health")).json() == {"status": "ok", "models": [MODEL]}
    mesh.served.clear()
    assert (await http.get("/health")).json() == {"status": "ok", "models": []}


async def test_a_model_stays_listed_while_nothing_serves_it(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.last_served, mesh.served = mesh.served, []
    assert (await http.get("/health")).json()["models"] == [MODEL]
    [card] = (await http.get("/v1/models")).json()["data"]
    assert (await http.get(f"/v1/models/{MODEL}")).json() == card
    assert (await http.get("/ready")).status_code == (await http.post(CHAT, json=HELLO)).status_code == 503


async def test_an_adapter_is_a_model_with_a_parent_and_answers_under_its_name(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.served.append(ServedModel("legal", 256, 1_700_000_001, parent=MODEL))
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [(MODEL, None), ("legal", MODEL)]
    assert (await http.get("/v1/models/legal")).json() == listed[1]
    answer = (await http.post(CHAT, json={**HELLO, "model": "legal"})).json()
    assert answer["model"] == "legal"
    assert [prompt.model for prompt in mesh.prompts] == ["legal"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_counted_under_the_names_dashboards_know(
    http: httpx.AsyncClient, mesh: FakeMesh, stream: bool
) -> None:
    mesh.pace_s = 0.002
    await http.post(CHAT, json={**HELLO, "stream": stream})
    at = f'{{model_name="{MODEL}",route="{CHAT}"}}'
    assert await value_of(http, f"kvmesh_time_to_first_token_seconds_count{at}") == 1
    assert await value_of(http, f"kvmesh_e2e_request_latency_seconds_count{at}") == 1
    assert await value_of(http, f'kvmesh_inter_token_latency_seconds_count{{model_name="{MODEL}"}}') == mesh.deltas - 1
    assert await value_of(http, f'kvmesh_inter_token_latency_seconds_bucket{{le="+Inf",model_name="{MODEL}"}}') > 0
    assert await value_of(http, f'kvmesh_inter_token_latency_seconds_sum{{model_name="{MODEL}"}}') >= 0.002
    assert await value_of(http, f'kvmesh_prompt_tokens_total{{model_name="{MODEL}"}}') == len(mesh.prompts[0].token_ids)
    assert await value_of(http, f'kvmesh_generation_tokens_total{{model_name="{MODEL}"}}') == mesh.deltas
    assert await value_of(http, f'kvmesh_requests_total{{model_name="{MODEL}",route="{CHAT}",status="200"}}') == 1
    assert await value_of(http, f'kvmesh_request_success_total{{finished_reason="stop",model_name="{MODEL}"}}') == 1
    assert await value_of(http, f'kvmesh_num_requests_running{{model_name="{MODEL}"}}') == 0


async def test_a_running_request_is_seen_running(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.pace_s = 0.05
    request = asyncio.create_task(http.post(CHAT, json=HELLO))
    await until(lambda: mesh.running)
    assert await value_of(http, f'kvmesh_num_requests_running{{model_name="{MODEL}"}}') == 1
    await request


async def test_tokens_are_counted_as_they_arrive(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    """They were counted when their request ended: a chart showed nothing, and then a spike."""
    mesh.gate = asyncio.Semaphore(3)  # of the answer's tokens
    request = asyncio.create_task(http.post(CHAT, json=HELLO))
    await until(lambda: mesh.deltas == 3)
    at = f'{{model_name="{MODEL}"}}'
    counted = [f"kvmesh_{what}_tokens_total{at}" for what in ("prompt", "generation")]
    prompt_tokens = len(mesh.prompts[0].token_ids)
    assert [await value_of(http, name) for name in counted] == [prompt_tokens, 3]
    for _ in range(100):
        mesh.gate.release()
    usage = (await request).json()["usage"]
    assert [usage["prompt_tokens"], usage["completion_tokens"]] == [prompt_tokens, mesh.deltas]
    assert [await value_of(http, name) for name in counted] == [prompt_tokens, mesh.deltas]


async def test_a_prompt_without_an_answer_is_counted_once_at_the_end(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 0, DecodeLost("gone")
    assert (await http.post(CHAT, json=HELLO)).status_code == 502
    at = f'{{model_name="{MODEL}"}}'
    assert await value_of(http, f"kvmesh_prompt_tokens_total{at}") == len(mesh.prompts[0].token_ids)
    assert await value_of(http, f"kvmesh_generation_tokens_total{at}") == 0


async def test_failures_are_counted_by_status(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at, mesh.failure = 1, DecodeLost("gone")
    await http.post(CHAT, json=HELLO)
    await http.post(CHAT, json={**HELLO, "stream": True})  # its client read 200; the count knows better
    assert await value_of(http, f'kvmesh_requests_total{{model_name="{MODEL}",route="{CHAT}",status="502"}}') == 2


async def test_what_clients_send_never_becomes_a_label(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json={**HELLO, "model": "invented"})
    await http.post("/v1/invented", json=HELLO)
    assert "invented" not in (await http.get("/metrics")).text
    assert await value_of(http, f'kvmesh_requests_total{{model_name="",route="{CHAT}",status="404"}}') == 1


async def test_no_request_makes_a_series_that_another_of_its_kind_did_not(http: httpx.AsyncClient) -> None:
    async def ask(number: int) -> set[str]:
        odd = f"odd-{number}"
        headers = {"x-request-id": odd, "authorization": f"Bearer {odd}", "user-agent": odd, "host": odd}
        for path in (CHAT, "/v1/completions", f"/v1/{odd}", f"/v1/models/{odd}"):
            for body in ({**HELLO, "model": odd}, {**HELLO, "user": odd, "max_tokens": 2}, {odd: odd}):
                await http.request("POST" if number % 2 else odd.upper(), path, json=body, headers=headers)
                await http.get(path, headers=headers)
        text = (await http.get("/metrics")).text
        assert odd not in text
        return {line.rpartition(" ")[0] for line in text.splitlines()}

    first = await ask(1) | await ask(2)
    assert await ask(3) | await ask(4) == first


async def test_the_api_description_holds_the_bodies_it_takes(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    for path, name in ((CHAT, "ChatRequest"), ("/v1/completions", "CompletionRequest")):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert "model" in described["components"]["schemas"][name]["required"]
    references = re.findall(r"#/components/schemas/([^\"']+)", str(described))
    assert set(references) <= set(described["components"]["schemas"])


def test_a_frontend_loads_no_torch() -> None:
    """It derives the seeds of branches as the engine does, from a module that has nothing else in it."""
    program = "import sys, services.frontend.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_a_frontend_reads_its_models_end_tokens(tmp_path: Path) -> None:
    _, text = await load_text(FrontendSettings(model="mock", state_dir=tmp_path))
    assert text.ends == {SPECIAL[END]}


def test_a_frontend_that_starts_again_under_its_id_reads_tokens_on_another_subject() -> None:
    """Decode went on with the streams of the process before, and their tokens reached clients of the new one."""
    settings = FrontendSettings(nats_name="front", namespace="mesh")
    first, second = (tokens_subject(settings, Registration("f1")) for _ in range(2))
    assert first != second
    for subject in (first, second):
        assert re.fullmatch(r"mesh\.tokens\.front\.f1-[0-9a-f]+", subject), "of four parts, for NATS's permissions"
