"""make soak: each topology under load, with clients that leave at random. It takes ten minutes; SOAK_S changes that.

Only the engines are mocks, whose tokens depend on the content of their pages.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import pytest

from components.errors import MeshError
from tests.mesh.harness import Client, MeshProcesses, metrics_of, open_client
from tests.mesh.mocks import MAX_TOKENS, MOCK_ENV, MODEL, no_page_is_lost, one_engine, random_prompts
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.soak]

SOAK_S: Final = float(os.environ.get("SOAK_S", "600"))
TOPOLOGIES: Final = [(1, 1), (2, 1), (1, 2), (2, 2)]
CLIENTS: Final = 24
GROWTH: Final = 1.10  # of a process's memory, after a third of the time
GROWTH_BYTES: Final = 16 << 20


@pytest.fixture
def mesh(etcd_url: str, nats_url: str, namespace: str, tmp_path: Path) -> Iterator[MeshProcesses]:
    """A mesh without processes, whose small pools evict blocks all the time."""
    env = {**MOCK_ENV, "MESH_ENGINE__NUM_PAGES": "512", "MESH_TRACES_PER_S": "2"}
    with MeshProcesses(etcd_url, nats_url, namespace, tmp_path, MODEL, env) as processes:
        yield processes


class Load:
    """Clients that check their tokens, and some that leave early."""

    def __init__(self, client: Client, url: str, home: Path, until: float) -> None:
        self.counts: Counter[str] = Counter()
        self._client = client
        self._url = url
        self._until = until
        self._prompts = random_prompts(100)
        self._expected = one_engine(home, self._prompts)

    async def run(self, seed: int) -> None:
        """Run one client until the end."""
        draw = random.Random(seed)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S) as http:
            while time.monotonic() < self._until:
                i, salt = draw.randrange(len(self._prompts)), f"salt {draw.randrange(3)}"
                what = draw.choice(["stays", "stays", "leaves", "hangs up"])
                try:
                    async with asyncio.timeout(PATIENCE_S):  # only a hang takes so long
                        match what:
                            case "stays":
                                await self._stay(i, salt)
                            case "leaves":
                                await self._leave(i, salt, draw.random() * 0.1)
                            case _:
                                await self._hang_up(http, draw)
                except MeshError as exc:
                    what = f"{what}: {exc.message}"
                except TimeoutError as exc:
                    raise AssertionError(f"client {seed} hangs, who {what}; {self._everywhere()}") from exc
                self.counts[what] += 1

    def _everywhere(self) -> dict[str, list[str]]:
        records = [r for role in ("prefill", "decode", "bootstrap") for r in self._client.book.of_role(role)]
        return {f"{r.role} {r.instance_id}": standing(r.http) for r in records}

    async def _stay(self, i: int, salt: str) -> None:
        answer = await self._client.generate(self._prompts[i], MAX_TOKENS, model=MODEL, salt=salt)
        assert answer == self._expected[i], f"prompt {i} was answered wrongly"

    async def _leave(self, i: int, salt: str, after_s: float) -> None:
        asking = asyncio.create_task(self._client.generate(self._prompts[i], MAX_TOKENS, model=MODEL, salt=salt))
        await asyncio.sleep(after_s)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    async def _hang_up(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Leave in the middle of an answer over HTTP, or before its first byte."""
        body = {"model": MODEL, "prompt": "x" * draw.randrange(1, 400), "max_tokens": 200, "stream": True}
        lines = draw.randrange(20)
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.random()), http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    lines -= 1
                    if lines < 0:
                        return


@pytest.mark.timeout(SOAK_S / len(TOPOLOGIES) + 180)
@pytest.mark.parametrize(("prefills", "decodes"), TOPOLOGIES, ids=str)
def test_nothing_hangs_leaks_or_grows(mesh: MeshProcesses, prefills: int, decodes: int) -> None:
    seconds = SOAK_S / len(TOPOLOGIES)

    async def run() -> Counter[str]:
        async with open_client(mesh, MODEL) as client:
            await client.until_usable("prefill", prefills)
            await client.until_usable("decode", decodes)
            load = Load(client, mesh.one("frontend").url, mesh.home, time.monotonic() + seconds)
            async with asyncio.TaskGroup() as group:
                for seed in range(CLIENTS):
                    group.create_task(load.run(seed))
                await asyncio.sleep(seconds / 3)
                before = memory(mesh)
            after = memory(mesh)
            await no_page_is_lost(client)
            for record in [r for role in ("prefill", "decode", "bootstrap") for r in client.book.of_role(role)]:
                assert not standing(record.http), f"{record.role} {record.instance_id} has something left"
        for name, bytes_before in before.items():
            assert after[name] < bytes_before * GROWTH + GROWTH_BYTES, (
                f"{name}: {bytes_before} bytes, then {after[name]}"
            )
        return load.counts

    mesh.start("bootstrap", *["prefill"] * prefills, *["decode"] * decodes, "frontend")
    counts = asyncio.run(run())
    print(dict(counts))  # noqa: T201  of a run of minutes one wants to see something
    assert counts["stays"] > 0
    assert counts["leaves"] > 0
    assert counts["hangs up"] > 0
    assert set(counts) == {"stays", "leaves", "hangs up"}, "nothing fails that nobody killed"
    assert all(worker.popen.poll() is None for worker in mesh.workers)


def memory(mesh: MeshProcesses) -> dict[str, int]:
    """Return the resident bytes of each process."""
    pages = {f"{w.role} {w.popen.pid}": Path(f"/proc/{w.popen.pid}/statm").read_text().split()[1] for w in mesh.workers}
    return {name: int(count) * os.sysconf("SC_PAGE_SIZE") for name, count in pages.items()}


def standing(url: str | None) -> list[str]:
    """Return queues and rooms that are not empty."""
    lines = [line for line in metrics_of(url) if line.startswith(("kvmesh_queue_length{", "kvmesh_open_rooms "))]
    return [line for line in lines if float(line.split()[-1])]
