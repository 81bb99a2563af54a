"""Several frontends behind one port: one that stops loses no request, one that is killed loses only its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.request import urlopen

import pytest

from bench.processes import free_port
from tests.mesh.harness import MeshProcesses, Worker, open_client
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

CLIENTS: Final = 8
END: Final = b"0\r\n\r\n"


@pytest.fixture
def port() -> int:
    return free_port()


def ready(worker: Worker) -> dict[str, str]:
    line = next(x for x in worker.logged().splitlines() if '"event": "ready"' in x)
    return dict(json.loads(line))


def read(url: str) -> str:
    with urlopen(url) as answer:
        return str(answer.read().decode())


def instance_of(page: str) -> str:
    return page.partition('kvmesh_build_info{instance_id="')[2].partition('"')[0]


def request(max_tokens: int, *, close: bool) -> bytes:
    fields = {"model": "mock", "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n"
    head += "connection: close\r\n" if close else ""
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


class Load:
    """Clients that send one request at a time, half of them on a new connection each time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answered = 0
        self.failed: list[str] = []
        self.over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for i in range(CLIENTS):
                tasks.create_task(self._client(close=i % 2 == 0))
            try:
                yield
            finally:
                self.over = True

    async def until(self, answered: int) -> None:
        """Wait for `answered` further answers."""
        wanted = self.answered + answered
        await until(lambda: self.answered >= wanted, lambda: f"{wanted} answers: {self.answered}, {self.failed[-5:]}")

    async def _client(self, *, close: bool) -> None:
        while not self.over:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    await self._ask(reader, writer, close=close)
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
            except (OSError, asyncio.IncompleteReadError) as exc:
                self.failed.append(repr(exc))

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, close: bool) -> None:
        """Send requests until the server ends the connection."""
        last = False
        while not (last or self.over):
            writer.write(request(4, close=close))
            last = await whole_answer(reader)
            self.answered += 1
            await asyncio.sleep(0.002)


async def whole_answer(reader: asyncio.StreamReader) -> bool:
    """Read an answer; return whether the connection closes after it."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    body = await reader.readuntil(END)
    assert body.endswith(b"data: [DONE]\n\n\r\n" + END), body
    return b"connection: close" in head


async def test_a_frontend_that_stops_loses_no_request_and_one_that_is_killed_only_its_own(
    mock_mesh: MeshProcesses, port: int
) -> None:
    mock_mesh.start("decode")
    sharing = {"MESH_FRONTEND_PORT": str(port), "MESH_FRONTEND_SHARE_PORT": "true"}
    frontends = mock_mesh.start("frontend", "frontend", "frontend", **sharing)
    await until_served(frontends)
    await each_has_a_page_of_its_own(mock_mesh, frontends, f"http://127.0.0.1:{port}")
    leaving, killed, _ = frontends
    load = Load(port)
    async with load.running():
        await load.until(100)
        assert await asyncio.to_thread(leaving.terminate) == 0, leaving.logged()
        await load.until(100)
        assert not load.failed
        killed.kill()
        await load.until(100)
    assert len(load.failed) <= CLIENTS


async def until_served(frontends: list[Worker]) -> None:
    """Wait until the page of each lists the model."""
    async with asyncio.timeout(PATIENCE_S):
        for worker in frontends:
            while not json.loads(await asyncio.to_thread(read, f"{ready(worker)['metrics']}/health"))["models"]:
                await asyncio.sleep(0.05)


async def each_has_a_page_of_its_own(mesh: MeshProcesses, frontends: list[Worker], url: str) -> None:
    """Both addresses are in etcd, and the page on the shared port names its instance."""
    names = {ready(worker)["instance"] for worker in frontends}
    pages = [await asyncio.to_thread(read, f"{ready(worker)['metrics']}/metrics") for worker in frontends]
    assert {instance_of(page) for page in pages} == names
    shared = {instance_of(await asyncio.to_thread(read, f"{url}/metrics")) for _ in range(60)}
    assert shared == names
    async with open_client(mesh, "mock") as client:
        records = client.book.of_role("frontend")
    assert {r.metrics for r in records} == {ready(worker)["metrics"] for worker in frontends}
    assert {r.http for r in records} == {url}
