import asyncio
import signal
import socket
from typing import Any

import httpx
import pytest

from components.http.server import serve_http
from components.startup import CannotServe
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.services.frontend.fake_mesh import MODEL, FakeMesh

pytestmark = pytest.mark.anyio
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

    async with serve_http(app, settings) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).is_success
    assert nodelay == [1]


async def test_signal_handlers_stay_their_owners(url: str) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_stop_lets_requests_in_flight_end(mesh: FakeMesh, text: TextModel, settings: FrontendSettings) -> None:
    mesh.pace_s = 0.03
    async with httpx.AsyncClient() as client:
        async with serve_http(create_app(mesh, text, settings), settings) as url:
            request = asyncio.create_task(client.post(f"{url}/v1/completions", json=HELLO))
            while not mesh.deltas:
                await asyncio.sleep(0.001)
        answer = await request
        assert answer.text.endswith("data: [DONE]\n\n")
        assert mesh.cancelled == 0
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")


async def test_a_stop_cancels_what_outlives_the_drain_timeout(mesh: FakeMesh, text: TextModel) -> None:
    mesh.gate = asyncio.Semaphore(0)
    settings = FrontendSettings(port=0, drain_timeout_s=0.2)
    async with httpx.AsyncClient() as client:
        async with serve_http(create_app(mesh, text, settings), settings) as url:
            request = asyncio.create_task(client.post(f"{url}/v1/completions", json=HELLO))
            while not mesh.running:
                await asyncio.sleep(0.001)
        with pytest.raises(httpx.HTTPError):
            (await request).raise_for_status()
    assert (mesh.running, mesh.cancelled) == (0, 1)
