from typing import Any

import httpx
import pytest

from components.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    DecodeLost,
    InvariantBroken,
    NoDecodeInstance,
    PromptTooLong,
    QueueFull,
)
from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
POSTS = [CHAT, COMPLETION, "/v1/embeddings", "/tokenize", "/detokenize"]
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
JSON = {"content-type": "application/json"}


def error_of(answer: httpx.Response, status: int, code: str | None, param: str | None = None) -> str:
    """The message, after a look at everything around it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.headers["x-request-id"]) == 32
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert "Traceback" not in answer.text
    return str(error["message"])


@pytest.mark.parametrize("path", POSTS)
async def test_malformed_json_is_400(http: httpx.AsyncClient, path: str) -> None:
    error_of(await http.post(path, content=b'{"model": "ti', headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data"}])
async def test_another_content_type_is_415(http: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    error_of(await http.post(path, content=b"{}", headers=headers), 415, "unsupported_media_type")


async def test_a_content_type_with_charset_is_json_too(http: httpx.AsyncClient) -> None:
    headers = {"content-type": 'Application/JSON; charset="UTF-8"', "content-encoding": "identity"}
    assert (await http.post(CHAT, content=httpx.Request("POST", "/", json=HELLO).content, headers=headers)).is_success


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-encoding": "identity, br"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": 'application/json; charset="latin1"'},
    ],
    ids=str,
)
async def test_a_body_that_is_compressed_or_no_utf_8_is_415(
    http: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    """Both were ignored, and the body was read as it came."""
    told = error_of(await http.post(path, json=HELLO, headers={**JSON, **headers}), 415, "unsupported_media_type")
    assert "gzip" in told or "br" in told or "utf-16" in told or "latin1" in told


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_over_the_limit_is_413_by_its_declared_length(
    http: httpx.AsyncClient, mesh: FakeMesh, path: str
) -> None:
    answer = await http.post(path, content=b" " * 70_000, headers=JSON)
    told = error_of(answer, 413, "request_too_large")
    assert "65536" in told
    assert "--max-body-bytes" in told
    assert not mesh.prompts


async def test_a_body_over_the_limit_is_413_when_it_does_not_say_its_length(http: httpx.AsyncClient) -> None:
    async def chunks() -> Any:
        for _ in range(70):
            yield b" " * 1000

    error_of(await http.post(CHAT, content=chunks(), headers=JSON), 413, "request_too_large")


async def test_an_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    assert "nobody" in error_of(
        await http.post(CHAT, json={**HELLO, "model": "nobody"}), 404, "model_not_found", "model"
    )
    error_of(await http.get("/v1/models/nobody"), 404, "model_not_found", "model")


async def test_no_model_at_all_is_503_with_retry_after(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.served.clear()
    answer = await http.post(CHAT, json=HELLO)
    error_of(answer, 503, "no_instance")
    assert answer.headers["retry-after"] == "1"


async def test_a_message_shows_json_as_the_client_writes_it(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json={**HELLO, "tool_choice": 5})
    assert "{'type': 'function', 'function': {'name': …}}" in answer.json()["error"]["message"]
    assert "{{" not in answer.text


async def test_more_tokens_than_the_context_has_left_is_400_with_both_numbers(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETION, json={"model": MODEL, "prompt": [5] * 10, "max_tokens": CONTEXT})
    message = error_of(answer, 400, "context_length_exceeded", "prompt")
    assert str(CONTEXT) in message
    assert str(CONTEXT + 10) in message


async def test_a_prompt_over_the_context_is_400_with_both_numbers(http: httpx.AsyncClient) -> None:
    answer = await http.post(COMPLETION, json={"model": MODEL, "prompt": [5] * CONTEXT})
    message = error_of(answer, 400, "context_length_exceeded", "prompt")
    assert message.count(str(CONTEXT)) == 2


async def test_an_unknown_url_is_404_and_a_wrong_method_405(http: httpx.AsyncClient) -> None:
    for path in ("/", "/v1", "/v1/chat/completions/", "/docs", "/v1/nothing"):
        message = error_of(await http.get(path), 404, "unknown_url")
        assert "/openapi.json" in message, "a person with a browser learns where to look"
        assert "/v1/models" in message
    answer = await http.get(CHAT)
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    for path in ("/v1/models", "/v1/embeddings", "/tokenize", "/detokenize", "/ready", "/workers", "/openapi.json"):
        error_of(await http.delete(path), 405, "method_not_allowed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (NoDecodeInstance("none", retry_after_s=2), 503, "no_instance"),
        (QueueFull("full", retry_after_s=2), 429, "rate_limit_exceeded"),
        (DecodeLost("gone"), 502, "instance_lost"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (BackendUnavailable("nats://10.0.0.7"), 503, "backend_unavailable"),
        (PromptTooLong("500 of 100"), 400, "context_length_exceeded"),
        (InvariantBroken("secret"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(
    http: httpx.AsyncClient, mesh: FakeMesh, failure: Exception, status: int, code: str, stream: bool
) -> None:
    mesh.fail_at, mesh.failure = 0, failure
    answer = await http.post(CHAT, json={**HELLO, "stream": stream})
    message = error_of(answer, status, code)
    assert "secret" not in message
    assert "10.0.0.7" not in message
    if status >= 500:
        assert answer.headers["x-request-id"] in message
    assert answer.headers.get("x-should-retry") == ("false" if isinstance(failure, DeadlineExceeded) else None)
    if "retry_after_s" in getattr(failure, "fields", {}):
        assert answer.headers["retry-after"] == "2"


async def test_a_failure_without_stream_after_some_tokens_still_has_its_status(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.fail_at, mesh.failure = 3, DecodeLost("gone")
    error_of(await http.post(CHAT, json=HELLO), 502, "instance_lost")


async def test_the_clients_request_id_comes_back_and_is_not_used(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mine = "a" * 32
    answer = await http.post(CHAT, json=HELLO, headers={"x-request-id": mine})
    assert answer.headers["x-request-id"] == mine
    assert mesh.prompts[0].request_id != mine
    assert answer.json()["id"] == f"chatcmpl-{mesh.prompts[0].request_id}"


async def test_control_characters_of_a_client_reach_no_header_and_no_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    nasty = "a\r\nx-evil: 1\r\n\x1b[31m"
    for body in (HELLO | {"model": nasty}, HELLO | {"user": nasty}, HELLO | {"prompt_cache_key": nasty}):
        answer = await http.post(CHAT, json=body, headers={"x-request-id": "b\x1b[31m"})
        assert answer.status_code in {200, 400, 404}
        assert "x-evil" not in answer.headers
        assert all("\x1b" not in value for value in answer.headers.values())
    ours = [record for record in caplog.records if record.name.startswith(("services", "components"))]
    assert all("\x1b" not in str(vars(record)) for record in ours)
