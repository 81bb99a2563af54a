"""A prefill and a decode worker with small pools, which keep evicted pages in main memory or in files."""

import asyncio
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from components.wire.instances import InstanceRecord
from tests.mesh.harness import Client, MeshProcesses, metric, open_client
from tests.mesh.mocks import no_page_is_lost
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = pytest.mark.mesh

MODEL: Final = "tiny"
MAX_TOKENS: Final = 12
POOL: Final = {"MESH_ENGINE__NUM_PAGES": "48"}  # room for the longest prompt
ROOM_GB: Final = "0.02"  # for all pages of all prompts


def _prompts() -> list[list[int]]:
    """Of up to 600 tokens, in families that begin alike. No pool holds a third of them."""
    draw = random.Random(6)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    families = [tokens(length) for length in (64, 200, 400)]
    return [begin + tokens(draw.randrange(1, 200)) for _ in range(4) for begin in families]


async def _ask(client: Client, prompts: list[list[int]], salt: str) -> list[list[int]]:
    """One at a time, so that each evicts the pages of earlier ones."""
    return await client.generate_all(prompts, MAX_TOKENS, salt, model=MODEL, in_flight=1)


async def _ask_twice(
    client: Client, prompts: list[list[int]], workers: list[InstanceRecord], salt: str
) -> tuple[list[list[list[int]]], list[float]]:
    """Return the answers of both rounds, and the bytes sent in each."""
    answers, sent = [], [_sent_bytes(workers)]
    for _ in range(2):
        answers.append(await _ask(client, prompts, salt))
        sent.append(_sent_bytes(workers))
    return answers, [after - before for before, after in pairwise(sent)]


def _sent_bytes(workers: list[InstanceRecord]) -> float:
    received, sent = _counts(workers, "kvmesh_kv_transfer_bytes_total")
    assert received == sent
    return sent


def _counts(workers: list[InstanceRecord], name: str) -> list[float]:
    return [metric(worker.http, name) for worker in workers]


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_tokens_are_those_of_a_pool_that_holds_everything(
    tiny_mesh: MeshProcesses, tmp_path: Path, in_files: bool
) -> None:
    """In the second round decode has all pages but the last ones of the prompts, which prefill has."""
    prompts = _prompts()
    kept = {**POOL, "MESH_ENGINE__KV_OFFLOAD_GB": ROOM_GB}
    if in_files:
        kept = {**POOL, "MESH_ENGINE__KV_STORE_DIR": str(tmp_path / "kv")}
    found = f"kvmesh_kv_{'loaded' if in_files else 'restored'}_pages_total"

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await _ask(client, prompts, "aggregated")
            assert await asyncio.to_thread(roomy.terminate) == 0
            await until(lambda: not client.decodes.usable())
            tiny_mesh.start("decode", "prefill", **kept)
            workers = [(await client.until_usable(role))[0] for role in ("decode", "prefill")]
            answers, sent = await through_prefill(client, partial(_ask_twice, client, prompts, workers))
            assert answers == [expected, expected]
            assert sent[1] < sent[0] / 4
            assert min(_counts(workers, found)) > 0
            await no_page_is_lost(client)

    tiny_mesh.start("bootstrap")
    roomy = tiny_mesh.start_one("decode")
    asyncio.run(run())


def test_pages_survive_the_workers_that_computed_them(tiny_mesh: MeshProcesses, tmp_path: Path) -> None:
    """Both workers are killed. Those that replace them compute a few last tokens of each prompt, and send hardly any KV."""
    prompts = _prompts()
    with_files = {"MESH_ENGINE__KV_STORE_DIR": str(tmp_path / "kv")}

    async def figures(client: Client) -> tuple[float, float, float]:
        """KV bytes sent, prompt tokens computed and pages loaded."""
        workers = [(await client.until_usable(role))[0] for role in ("decode", "prefill")]
        await until(lambda: not any(_counts(workers, "kvmesh_kv_unsaved_pages")))
        computed = sum(_counts(workers, "kvmesh_prompt_tokens_total"))
        return _sent_bytes(workers), computed, min(_counts(workers, "kvmesh_kv_loaded_pages_total"))

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:

            async def ask(salt: str) -> tuple[str, list[list[int]]]:
                return salt, await _ask(client, prompts, salt)

            for role in ("decode", "prefill"):
                await client.until_usable(role)
            salt, answers = await through_prefill(client, ask)
            sent, computed, _ = await figures(client)
            await asyncio.sleep(0.5)  # the last pages are on their way to the disk
            for worker in first:
                worker.kill()
            await until(lambda: not client.decodes.usable() and not client.prefills.usable())
            tiny_mesh.start("decode", "prefill", **with_files)
            for role in ("decode", "prefill"):
                await client.until_usable(role)
            assert await _ask(client, prompts, salt) == answers
            sent_again, computed_again, loaded = await figures(client)
            assert loaded > len(prompts)
            assert (sent_again < sent / 4, computed_again < computed / 4) == (True, True)

    tiny_mesh.start("bootstrap")
    first = tiny_mesh.start("decode", "prefill", **with_files)
    asyncio.run(run())
