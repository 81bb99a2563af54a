"""A tiny embedding model through the whole mesh: HTTP, NATS, the engine, and back."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from tests.components.text.tiny_model import tiny_tokenizer
from tests.engine.embedding_model import CONFIG, SIZE, cosines, reference, save_embedding_model
from tests.mesh.conftest import TINY_ENV
from tests.mesh.harness import MeshProcesses, Worker
from tests.mesh.preloaded import Preloaded
from tests.mesh.trace_checks import covered_trace
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh
TEXTS = ["Hello", "The capital of France is Paris.", "how are you today? " * 12, "Hello"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save_embedding_model(tmp_path / "embedder", is_matryoshka=True)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def url(etcd_url: str, nats_url: str, preloaded: Preloaded, directory: Path, tmp_path: Path) -> Iterator[str]:
    env = {**TINY_ENV, "MESH_SERVED_MODEL_NAME": "embedder", "MESH_ENGINE__MAX_STEP_TOKENS": "80"}
    env |= {"MESH_TRACES_PER_S": "inf"}
    with MeshProcesses(
        etcd_url, nats_url, f"embed-{secrets.token_hex(3)}", tmp_path, str(directory), env, preloaded
    ) as mesh:
        *_, frontend = mesh.start("decode", "frontend")
        wait_until(lambda: ready(frontend).is_success)
        yield frontend.url
        mesh.one("decode").kill()
        wait_until(lambda: not ready(frontend).is_success)
        assert ready(frontend).json()["reasons"] == ["no decode instance is usable"]


def ready(frontend: Worker) -> httpx.Response:
    return httpx.get(f"{frontend.url}/ready", timeout=PATIENCE_S)


def test_vectors_through_the_mesh_are_those_of_transformers(url: str, directory: Path, tmp_path: Path) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    tokenizer = tiny_tokenizer()
    token_ids = [tokenizer.encode(text).ids for text in TEXTS]
    vectors = np.array([item.embedding for item in answer.data])
    assert vectors.shape == (len(TEXTS), SIZE)
    np.testing.assert_allclose(cosines(vectors, reference(directory, token_ids, "lasttoken")), 1, atol=1e-3)
    assert answer.usage.total_tokens == sum(map(len, token_ids))
    short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16).data[0].embedding
    np.testing.assert_allclose(short, vectors[0][:16] / np.linalg.norm(vectors[0][:16]), atol=1e-5)
    many = client.embeddings.create(model="embedder", input=[f"{text} {i}" for i in range(40) for text in TEXTS])
    found = np.array([item.embedding for item in many.data])
    assert len(np.unique(found[[i for i in range(160) if i % 4 != 3]].round(4), axis=0)) == 120
    np.testing.assert_allclose(found[::4], found[3::4], atol=1e-5)  # the first and the last text are the same

    with pytest.raises(BadRequestError, match=f"{CONFIG['max_position_embeddings']}") as caught:
        client.embeddings.create(model="embedder", input="Paris " * 400)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "Hello"}])

    def ask() -> str:
        response = httpx.post(
            f"{url}/v1/embeddings", json={"model": "embedder", "input": TEXTS * 20}, timeout=PATIENCE_S
        )
        return str(response.headers["x-request-id"])

    steps = {"frontend.read", "frontend.validate", "frontend.tokenize", "frontend.admit", "frontend.route"}
    covered_trace(ask, tmp_path, steps | {"frontend.dispatch", "decode.embed", "frontend.answer"})
    [decode] = [worker for worker in workers(url) if worker["role"] == "decode"]
    assert (decode["state"], decode["model"], decode["load"]["held_pages"]) == ("up", "embedder", 0)


def workers(url: str) -> list[dict[str, Any]]:
    """Wait for a heartbeat that reports no running request."""
    listed: list[dict[str, Any]] = []

    def is_reported() -> bool:
        listed[:] = httpx.get(f"{url}/workers", timeout=PATIENCE_S).json()["data"]
        return all(w["load"] and not w["load"]["held_pages"] for w in listed if w["role"] == "decode")

    wait_until(is_reported, lambda: listed)
    return listed
