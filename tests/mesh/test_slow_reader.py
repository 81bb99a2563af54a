"""A client that stops reading: its buffers are bounded, it is disconnected, and others are unaffected."""

import asyncio
import json
import resource
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.mesh.harness import MeshProcesses, metric, open_client
from tests.mesh.mocks import MODEL, NO_COST, no_page_is_lost
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

READERS: Final = 3
CUT_OFF_S: Final = 3.0
MAX_GROWTH: Final = 48 * 2**20  # bytes of the frontend
BODY: Final[dict[str, Any]] = {"model": MODEL, "prompt": "a", "ignore_eos": True, "stream": True}


def deaf(url: str, **fields: Any) -> socket.socket:
    """Send a request, and read no more than its headers."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps({**BODY, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    return connection


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cut_off(url: str) -> float:
    return metric(url, 'kvmesh_http_connections_closed_total{reason="unread"}')


def test_readers_that_stop_cost_bounded_memory_and_are_cut_off_while_others_stream(mock_mesh: MeshProcesses) -> None:
    *_, frontend = mock_mesh.start(
        "bootstrap",
        "prefill",
        "decode",
        "frontend",
        MESH_FRONTEND_CLIENT_TIMEOUT_S=str(CUT_OFF_S),
        MESH_ENGINE__MOCK__SPEEDUP="1",
        MESH_ENGINE__MOCK__STEP_S="0.002",
        **NO_COST,
    )
    url = frontend.url
    wait_until(frontend.models)

    async def run() -> None:
        async with (
            open_client(mock_mesh, MODEL) as client,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
            AsyncExitStack() as stack,
        ):
            await client.until_usable("prefill")
            before = resident_bytes(frontend.popen.pid)
            for _ in range(READERS):
                stack.enter_context(await asyncio.to_thread(deaf, url, max_tokens=4000, n=2, logprobs=5))
            most = 0
            async with asyncio.timeout(PATIENCE_S):
                while await asyncio.to_thread(cut_off, url) < READERS:
                    answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 50})
                    assert answer.text.endswith("data: [DONE]\n\n"), "others stream meanwhile"
                    most = max(most, resident_bytes(frontend.popen.pid) - before)
            assert most < MAX_GROWTH
            await no_page_is_lost(client)

    asyncio.run(run())
