"""Hosts and origins where there are no API keys: a page of another site does not get to use the model."""

import socket
from typing import Any, Final

import httpx
import pytest

from components.api_keys import parse_list
from components.http.server import serve_http
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.keys import KeyRing
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
CHAT: Final = "/v1/chat/completions"
HELLO: Final[dict[str, Any]] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
OURS: Final = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "10.1.2.3:8000",
    "[::1]",
    "[::1]:8000",
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "chat.localhost",
    "frontend",
    "frontend:8000",
    socket.gethostname(),
]
OTHERS: Final = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "::1]",
    "",
    "a b.c",
]


async def ask(mesh: FakeMesh, headers: dict[str, str], keys: KeyRing | None = None, **settings: Any) -> httpx.Response:
    limits = FrontendSettings(port=0, drain_timeout_s=2, **settings)
    async with (
        serve_http(create_app(mesh, mesh.text, limits, keys=keys), limits) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for path in ("/health", "/live", "/ready"):
            assert (await http.get(path, headers=headers)).status_code == 200, "probes are always answered"
        models = await http.get("/v1/models", headers=headers)
        answer = await http.post(CHAT, json=HELLO, headers=headers)
        assert models.status_code == answer.status_code
        return answer


@pytest.mark.parametrize("host", OURS)
async def test_a_host_that_is_nobody_elses_is_answered(mesh: FakeMesh, host: str) -> None:
    assert (await ask(mesh, {"host": host})).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
async def test_a_name_that_a_page_may_have_pointed_here_is_403(mesh: FakeMesh, host: str) -> None:
    """Any host was answered: a page could use the model by pointing its own name at 127.0.0.1."""
    answer = await ask(mesh, {"host": host})
    assert answer.status_code == 403
    assert "MESH_FRONTEND_ALLOWED_HOSTS" in answer.json()["error"]["message"]
    assert not mesh.prompts


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        ("llm.example", "llm.example:8000", 200),
        ("other.example, LLM.example", "llm.EXAMPLE", 200),
        ("llm.example", "a.llm.example", 403),
        ("*.example.org", "a.b.example.org", 200),
        ("*.example.org", "example.org", 403),
        ("*.example.org", "evilexample.org", 403),
        ("*", "evil.example", 200),
    ],
)
async def test_a_host_that_is_listed_is_answered(mesh: FakeMesh, allowed: str, host: str, status: int) -> None:
    assert (await ask(mesh, {"host": host}, allowed_hosts=allowed)).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://frontend:3000", 200),
        ("https://frontend", 200),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:8000", 200),
        ("tauri://localhost", 200),
        ("https://chat.example", 200),
        ("https://evil.example", 403),
        ("http://chat.example", 403),
        ("https://chat.example.evil.example", 403),
        ("http://10.1.2.3", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_pages_of_other_origins_may_not_post(mesh: FakeMesh, origin: str, status: int) -> None:
    answer = await ask(mesh, {"host": "frontend:8000", "origin": origin}, cors_origins="https://chat.example/")
    assert answer.status_code == status
    if status == 403:
        assert "MESH_FRONTEND_CORS_ORIGINS" in answer.json()["error"]["message"]
        assert not mesh.prompts


async def test_any_origin_may_be_allowed(mesh: FakeMesh) -> None:
    assert (await ask(mesh, {"origin": "https://any.example"}, cors_origins="*")).status_code == 200


async def test_where_there_are_keys_host_and_origin_do_not_matter(mesh: FakeMesh) -> None:
    headers = {"host": "evil.example", "origin": "https://evil.example", "authorization": "Bearer sk-0123456789"}
    assert (await ask(mesh, headers, KeyRing(parse_list("a:sk-0123456789")))).status_code == 200


async def test_a_refusal_of_messages_has_their_shape(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/messages", json=HELLO, headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
