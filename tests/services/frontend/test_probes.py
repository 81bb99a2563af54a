"""What those ask who run the mesh: probes, workers, the version, and the description of it all."""

from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from components.discovery.book import InstanceBook
from components.messaging.liveness import SILENT_AFTER_S, Liveness
from components.text.tokenizer import TextModel
from components.wire.heartbeat import Heartbeat
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.operations import Operations, workers_of
from tests.components.discovery.records import record
from tests.services.frontend.fake_mesh import FakeMesh

pytestmark = pytest.mark.anyio
PROBES = ["/health", "/live", "/ready", "/metrics", "/version", "/workers"]


async def test_ready_only_when_a_request_would_succeed(
    mesh: FakeMesh, text: TextModel, settings: FrontendSettings
) -> None:
    outages: list[str] = []
    operations = Operations(mesh, [lambda: outages[0] if outages else None])
    transport = httpx.ASGITransport(create_app(mesh, text, settings, operations=operations))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

        async def reasons() -> list[str]:
            answer = await http.get("/ready")
            told = answer.json()
            assert (answer.status_code, told["status"]) == ((503, "unready") if told["reasons"] else (200, "ready"))
            assert ("retry-after" in answer.headers) == bool(told["reasons"])
            return list(told["reasons"])

        assert await reasons() == []
        outages.append("NATS cannot be reached")
        assert await reasons() == outages
        served, mesh.served = mesh.served, []
        assert await reasons() == [*outages, "no decode instance is usable"]
        outages.clear()
        mesh.served = served
        operations.draining = True
        assert await reasons() == ["this frontend is draining"]
        assert (await http.head("/ready")).status_code == 503
        assert (await http.get("/live")).json() == {"status": "ok"}


async def test_a_drained_frontend_refuses_what_asks_for_work_and_answers_all_else(
    mesh: FakeMesh, text: TextModel, settings: FrontendSettings
) -> None:
    operations = Operations(mesh)
    transport = httpx.ASGITransport(create_app(mesh, text, settings, operations=operations))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"prompt": "Hello", "model": mesh.served[0].name}
        assert (await http.post("/tokenize", json=body)).status_code == 200
        operations.order.draining = True
        for path in ("/tokenize", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            refused = await http.post(path, json=body)
            status = 529 if path == "/v1/messages" else 503  # Anthropic's for an overload
            assert (refused.status_code, refused.headers["retry-after"]) == (status, "1")
            assert refused.headers["connection"] == "close", "the client's next connection may reach another frontend"
            assert "Send the request to another one" in refused.text
        metrics = (await http.get("/metrics")).text
        assert 'kvmesh_requests_refused_total{reason="draining"} 4.0' in metrics
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post("/v1/responses/resp_0/cancel")).json()["error"]["code"] != "draining"
        operations.order.draining = False
        assert (await http.post("/tokenize", json=body)).status_code == 200


@pytest.mark.parametrize("path", PROBES)
async def test_a_probe_may_ask_without_wanting_the_body(http: httpx.AsyncClient, path: str) -> None:
    asked, probed = await http.get(path), await http.head(path)
    assert (asked.status_code, probed.status_code, probed.content) == (200, 200, b"")
    assert probed.headers["content-type"] == asked.headers["content-type"]


async def test_the_version_is_reported(http: httpx.AsyncClient) -> None:
    version = (await http.get("/version")).json()["version"]
    assert version.count(".") == 2
    assert (await http.get("/openapi.json")).json()["info"] == {"title": "kvmesh", "version": version}


def test_workers_are_those_in_etcd_with_their_last_report() -> None:
    now = [0.0]
    book = InstanceBook()
    for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"), ("f", "frontend")):
        book.put(
            name,
            record(name, role=role, model="m", max_context=100, started_unix_ms=7000, adapters={"b": "1", "a": "2"}),
        )
    alive = Liveness(book, "decode", lambda: now[0])
    now[0] = SILENT_AFTER_S + 1
    load = {"num_running": 3, "free_pages": 5, "queued_tokens": 9}
    alive.record_heartbeat(Heartbeat(instance_id="d", epoch="e1", step=1, busy=True, draining=True, **load))
    alive.check()
    listed = {w["id"]: w for w in workers_of(book, {"decode": alive}).model_dump()["data"]}
    assert list(listed) == ["f", "d", "e", "p"]
    assert {name: w["state"] for name, w in listed.items()} == {"f": None, "d": "draining", "e": "silent", "p": None}
    assert load.items() <= listed["d"]["load"].items()
    assert [listed[name]["load"] for name in "fep"] == [None] * 3
    expected: dict[str, Any] = {"role": "decode", "epoch": "e1", "host": "h", "pid": 1, "started": 7, "model": "m"}
    expected |= {"adapters": ["a", "b"], "max_model_len": 100, "object": "worker"}
    assert expected.items() <= listed["d"].items()


async def test_the_description_is_valid_and_holds_every_route_with_its_answers(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    OpenAPIV31SpecValidator(described).validate()
    posts = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"}
    gets = {"/v1/models", "/v1/models/{model}", *PROBES}
    assert set(described["paths"]) >= posts | gets
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert "422" not in answers, path
            assert {"4XX", "5XX"} <= set(answers), path
            assert all(content["schema"] for content in answers["200"]["content"].values()), path
            assert ("requestBody" in operation) == (method == "post" and not path.endswith("/cancel")), path
            assert operation["description"], path
    assert set(described["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
