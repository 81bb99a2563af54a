"""`/v1/embeddings` over the fake mesh."""

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from components.errors import DecodeLost, InvariantBroken
from components.wire.embed import EmbeddingModel
from services.frontend.ports import ServedModel
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh, vector_of
from tests.services.frontend.raw_http import post
from tests.services.frontend.test_bad_inputs import error_of
from tests.services.frontend.test_operations import value_of
from tests.waiting import until

pytestmark = pytest.mark.anyio
EMBED = "embedder"
PATH = "/v1/embeddings"
SIZE = 8


@pytest.fixture(autouse=True)
def embedder(mesh: FakeMesh) -> FakeMesh:
    serve(mesh)
    return mesh


def serve(mesh: FakeMesh, **about: Any) -> None:
    embedding = EmbeddingModel(dimensions=SIZE, normalised=True, **about)
    mesh.served[1:] = [ServedModel(EMBED, CONTEXT, 1_700_000_000, embedding=embedding)]


def expected(mesh: FakeMesh, *texts: str) -> list[list[float]]:
    return [
        np.frombuffer(vector_of(mesh.text._encode(t, add_special_tokens=True), SIZE), "<f4").tolist() for t in texts
    ]


async def test_each_form_of_input_gives_a_vector_each_with_usage(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    one = (await http.post(PATH, json={"model": EMBED, "input": "Hello"})).json()
    tokens = len(mesh.texts[0].token_ids[0])
    assert one == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": expected(mesh, "Hello")[0]}],
        "model": EMBED,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    two = (await http.post(PATH, json={"model": EMBED, "input": ["Hello", "Paris"], "user": "u"})).json()
    assert [d["embedding"] for d in two["data"]] == expected(mesh, "Hello", "Paris")
    assert [d["index"] for d in two["data"]] == [0, 1]
    for given, passed in (([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])):
        assert (await http.post(PATH, json={"model": EMBED, "input": given})).json()["usage"]["total_tokens"] == sum(
            map(len, passed)
        )
        assert mesh.texts[-1].token_ids == passed


async def test_the_openai_package_reads_base64_and_floats(
    openai: AsyncOpenAI, http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    for encoding in ({}, {"encoding_format": "float"}):  # by itself the package asks for base64
        answer = await openai.embeddings.create(model=EMBED, input=["Hello"], **encoding)
        assert answer.data[0].embedding == pytest.approx(expected(mesh, "Hello")[0])
    raw = (await http.post(PATH, json={"model": EMBED, "input": "Hello", "encoding_format": "base64"})).json()
    shown = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert shown.tolist() == expected(mesh, "Hello")[0]


async def test_a_matryoshka_model_s_vectors_are_cut_and_have_length_1_again(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    serve(mesh, matryoshka=True, matryoshka_dimensions=[2, 4])
    answer = await http.post(PATH, json={"model": EMBED, "input": "Hello", "dimensions": 4})
    whole = np.array(expected(mesh, "Hello")[0][:4])
    assert answer.json()["data"][0]["embedding"] == pytest.approx((whole / np.linalg.norm(whole)).tolist())
    message = error_of(
        await http.post(PATH, json={"model": EMBED, "input": "a", "dimensions": 3}), 400, "invalid_value", "dimensions"
    )
    assert "2, 4" in message


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", 1]}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input[0]"),
        ({"input": {"a": 1}}, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": [-1]}, "invalid_value", "input"),
        ({"input": [99999]}, "invalid_value", "input"),
        ({"input": ["a", ""], "add_special_tokens": False}, "invalid_value", "input[1]"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"dimensions": SIZE + 1}, "invalid_value", "dimensions"),
        ({"dimensions": 4}, "invalid_value", "dimensions"),
        ({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "invalid_value", "input[0]"),
        ({"temperature": 1}, "unknown_parameter", "temperature"),
        ({"model": "nobody"}, None, "model"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    http: httpx.AsyncClient, mesh: FakeMesh, fields: dict[str, Any], code: str | None, param: str
) -> None:
    answer = await http.post(PATH, json={"model": EMBED, "input": "Hello", **fields})
    error_of(answer, 404 if param == "model" else 400, code or "model_not_found", param)
    assert not mesh.texts


async def test_a_text_may_fill_the_context_and_a_longer_one_is_400_with_both_numbers(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    assert (await http.post(PATH, json={"model": EMBED, "input": [5] * CONTEXT})).is_success
    too_long = {"model": EMBED, "input": ["Hello", *["word " * (CONTEXT + 20)]]}
    message = error_of(await http.post(PATH, json=too_long), 400, "context_length_exceeded", "input")
    assert str(CONTEXT) in message
    assert "input[1]" in message
    long = list(range(5, 25)) * 40
    for asked, kept in ((-1, long[-CONTEXT:]), (30, long[-30:])):
        assert (await http.post(PATH, json={"model": EMBED, "input": long, "truncate_prompt_tokens": asked})).is_success
        assert mesh.texts[-1].token_ids == [kept]


async def test_each_model_does_what_it_is_meant_for(http: httpx.AsyncClient) -> None:
    message = error_of(await http.post(PATH, json={"model": MODEL, "input": "a"}), 400, "unsupported_model", "model")
    assert "modules.json" in message
    chat = {"model": EMBED, "messages": [{"role": "user", "content": "a"}]}
    message = error_of(await http.post("/v1/chat/completions", json=chat), 400, "unsupported_model", "model")
    assert "/v1/embeddings" in message


async def test_failures_have_their_status_and_are_counted(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.fail_at = 0
    for failure, status, code in (
        (DecodeLost("10.0.0.7"), 502, "instance_lost"),
        (InvariantBroken("secret"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ):
        mesh.failure = failure
        answer = await http.post(PATH, json={"model": EMBED, "input": "a"})
        message = error_of(answer, status, code)
        assert "secret" not in message
        assert answer.headers["x-request-id"] in message
    assert await value_of(http, f'kvmesh_requests_total{{model_name="{EMBED}",route="{PATH}",status="500"}}') == 2


async def test_a_client_that_leaves_cancels_the_work(url: str, mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    _, writer = await post(url, PATH, {"model": EMBED, "input": "a"})
    await until(lambda: mesh.running)
    writer.close()
    await mesh.until_idle()
    assert mesh.cancelled == 1
