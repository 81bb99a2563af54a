from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from components.errors import DecodeLost
from tests.services.frontend.fake_mesh import MODEL, FakeMesh

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


def by_name(exporter: InMemorySpanExporter) -> Mapping[str, ReadableSpan]:
    finished = exporter.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished)
    return {span.name: span for span in finished}


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_one_tree_of_its_steps(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter, stream: bool
) -> None:
    answer = await http.post(CHAT, json={**HELLO, "stream": stream, "max_tokens": 3, "temperature": 0.5, "stop": "x"})
    found = by_name(spans)
    steps = {"frontend.validate", "frontend.tokenize", "frontend.first_token", "frontend.stream"}
    assert set(found) == {f"chat {MODEL}", *steps}
    root = found[f"chat {MODEL}"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert root.status.status_code is StatusCode.UNSET
    for name, span in found.items():
        if span is not root:
            assert span.parent is not None, name
            assert span.parent.span_id == root.context.span_id
            assert times(root)[0] <= times(span)[0] <= times(span)[1] <= times(root)[1]
    assert mesh.spans[0].span_id == root.context.span_id  # what the mesh does hangs below the request
    attributes = dict(root.attributes or {})
    ttft_s = attributes.pop("kvmesh.ttft_s")
    assert isinstance(ttft_s, float)
    assert 0 < ttft_s <= (times(root)[1] - times(root)[0]) / 1e9
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvmesh",
        "http.route": CHAT,
        "kvmesh.request_id": answer.headers["x-request-id"],
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.response.id": f"chatcmpl-{answer.headers['x-request-id']}",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(mesh.prompts[0].token_ids),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }


async def test_several_prompts_hang_below_one_request(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    await http.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
    root = by_name(spans)[f"text_completion {MODEL}"]
    assert {context.span_id for context in mesh.spans} == {root.context.span_id}


async def test_the_clients_trace_is_continued(http: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    await http.post(CHAT, json=HELLO, headers=parent)
    root = by_name(spans)[f"chat {MODEL}"]
    assert root.context.trace_id == int("ab" * 16, 16)
    assert root.parent is not None
    assert root.parent.span_id == int("cd" * 8, 16)


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-00", "ff-" + "a" * 5000])
async def test_a_broken_traceparent_begins_a_trace_of_its_own(
    http: httpx.AsyncClient, spans: InMemorySpanExporter, traceparent: str
) -> None:
    assert (await http.post(CHAT, json=HELLO, headers={"traceparent": traceparent})).is_success
    assert by_name(spans)[f"chat {MODEL}"].parent is None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_request_says_so(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter, stream: bool
) -> None:
    mesh.fail_at, mesh.failure = 2, DecodeLost("gone")
    await http.post(CHAT, json={**HELLO, "stream": stream})
    root = by_name(spans)[f"chat {MODEL}"]
    assert root.status.status_code is StatusCode.ERROR
    attributes = dict(root.attributes or {})
    assert attributes["error.type"] == "DecodeLost"
    assert attributes["http.response.status_code"] == 502
    assert attributes["gen_ai.usage.output_tokens"] == 2


async def test_a_model_that_a_client_made_up_names_no_span(
    http: httpx.AsyncClient, spans: InMemorySpanExporter
) -> None:
    await http.post(CHAT, json={**HELLO, "model": "invented"})
    assert set(by_name(spans)) == {"chat", "frontend.validate", "frontend.fail"}


async def test_a_refused_request_is_no_failure(http: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    """Clients' mistakes filled the lists of failed requests, and took the tail's budget."""
    assert (await http.post(CHAT, json={**HELLO, "max_tokens": -1})).status_code == 400
    root = by_name(spans)["chat"]
    assert root.status.status_code is StatusCode.UNSET
    attributes = dict(root.attributes or {})
    assert "max_tokens" in str(attributes["kvmesh.refused"])
    assert attributes["http.response.status_code"] == 400


async def test_a_span_says_which_api_was_asked(http: httpx.AsyncClient, spans: InMemorySpanExporter) -> None:
    await http.post("/v1/responses", json={"model": MODEL, "input": "Hello"})
    assert (by_name(spans)[f"chat {MODEL}"].attributes or {})["http.route"] == "/v1/responses"
