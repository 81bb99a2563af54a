import asyncio
import signal
import socket
from typing import Any

import httpx
import pytest

from components.http import server
from components.http.server import serve_http
from components.startup import CannotServe
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
STOPPED = "The server stopped before this request had ended. Try again."
HELLO: dict[str, Any] = {"model": MODEL, "prompt": "a", "stream": True}


async def test_a_taken_port_is_a_clear_error(mesh: FakeMesh, text: TextModel, settings: FrontendSettings) -> None:
    app = create_app(mesh, text, settings)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CannotServe, match=rf"127\.0\.0\.1:{port}: Address already in use.*--port"):
            async with serve_http(app, FrontendSettings(port=port)):
                pass


async def test_an_address_of_another_machine_is_a_clear_error(mesh: FakeMesh, text: TextModel) -> None:
    settings = FrontendSettings(host="192.0.2.1", port=0)
    with pytest.raises(CannotServe, match=r"192\.0\.2\.1:0: Cannot assign requested address.*--host"):
        async with serve_http(create_app(mesh, text, settings), settings):
            pass


async def test_a_host_that_can_be_no_name_is_a_clear_error(mesh: FakeMesh, text: TextModel) -> None:
    """Python's error for it is no OSError, so it was a traceback."""
    settings = FrontendSettings(host="a..b", port=0)
    with pytest.raises(CannotServe, match=r"'a\.\.b' is not an address or name of this machine; give another --host"):
        async with serve_http(create_app(mesh, text, settings), settings):
            pass


async def test_connections_do_not_wait_to_fill_packets(
    mesh: FakeMesh, text: TextModel, settings: FrontendSettings
) -> None:
    nodelay: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        transport = receive.__self__.flow._transport
        raw = transport.get_extra_info("socket")
        nodelay.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await create_app(mesh, text, settings)(scope, receive, send)

    async with serve_http(app, settings) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        assert (await client.get("/health")).is_success
    assert nodelay == [1]


async def test_signal_handlers_stay_their_owners(url: str) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_stop_lets_requests_in_flight_end(mesh: FakeMesh, text: TextModel) -> None:
    mesh.pace_s, settings = 0.03, FrontendSettings(port=0, drain_timeout_s=PATIENCE_S)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        async with serve_http(create_app(mesh, text, settings), settings) as url:
            request = asyncio.create_task(client.post(f"{url}/v1/completions", json=HELLO))
            await until(lambda: mesh.deltas)
        answer = await request
        assert answer.text.endswith("data: [DONE]\n\n")
        assert mesh.cancelled == 0
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")


async def test_requests_that_outlive_the_drain_time_get_an_error_in_the_form_of_their_api(
    mesh: FakeMesh, text: TextModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients got a bare 500 or a stream that broke off, and the log had a traceback for each."""
    monkeypatch.setattr(server, "LAST_ANSWERS_S", PATIENCE_S)
    mesh.gate = asyncio.Semaphore(0)
    settings = FrontendSettings(port=0, drain_timeout_s=0.2)
    said = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": said},
        "/v1/responses": {"input": "a", "store": False},
        "/v1/messages": {"messages": said, "max_tokens": 9},
    }
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        async with serve_http(create_app(mesh, text, settings), settings) as url:
            requests = {
                (path, stream): asyncio.create_task(
                    client.post(url + path, json={"model": MODEL, "stream": stream, **body})
                )
                for path, body in bodies.items()
                for stream in (False, True)
            }
            await until(lambda: mesh.running == len(requests))
            for _ in requests:  # one token each
                mesh.gate.release()
            await until(lambda: mesh.deltas == len(requests))
        answers = {key: await request for key, request in requests.items()}
    assert (mesh.running, mesh.cancelled) == (0, len(requests))
    for (path, stream), answer in answers.items():
        if stream:
            assert answer.status_code == 200
            assert STOPPED in answer.text
            assert "[DONE]" in answer.text or path in {"/v1/responses", "/v1/messages"}
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (529 if "messages" in path else 503, "1")
            assert STOPPED in answer.json()["error"]["message"]
    plain = answers["/v1/chat/completions", False].json()["error"]
    assert (plain["type"], plain["code"]) == ("service_unavailable_error", "stopping")
    lines = [record for record in caplog.records if record.name != "kvmesh.requests"]
    assert [line.message for line in lines] == ["requests cancelled: the drain time has ended"]
    assert [vars(line)["error"] for line in caplog.records if line not in lines] == ["Stopping"] * len(requests)
