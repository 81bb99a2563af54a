"""Prefill and decode on different numbers of ranks, over NIXL, with a model that computes its KV."""

import asyncio
import random
from typing import Final

import pytest

from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.mocks import no_page_is_lost
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = pytest.mark.mesh

MODEL: Final = "tiny"
MAX_TOKENS: Final = 8


def _prompts() -> list[list[int]]:
    draw = random.Random(5)
    begin = [draw.randrange(3, 512) for _ in range(100)]
    return [begin[: 50 * (i % 3)] + [draw.randrange(3, 512) for _ in range(20 + 45 * i)] for i in range(8)]


async def _ask(client: Client, salt: str) -> list[list[int]]:
    return await client.generate_all(_prompts(), MAX_TOKENS, salt, model=MODEL, in_flight=3)


def test_tokens_are_those_of_one_device(tiny_mesh: MeshProcesses) -> None:
    """From one rank to two, and from four, which share two KV heads, to two; page sizes differ, KV is verified."""

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await _ask(client, "alone")
            alone = tiny_mesh.one("decode")
            assert await asyncio.to_thread(alone.terminate) == 0
            ranks = {
                "MESH_ENGINE__TENSOR_PARALLEL": "2",
                "MESH_ENGINE__PAGE_SIZE": "32",
                "MESH_DECODE_VERIFY_KV": "true",
            }
            decode = await asyncio.to_thread(tiny_mesh.start_one, "decode", **ranks)
            [record] = await client.until_usable("decode")
            assert record.kv is not None
            assert (record.kv.devices, record.kv.layout.shards) == (["cpu", "cpu"], 2)
            for size, page_size in (("1", "16"), ("4", "32")):
                settings = {"MESH_ENGINE__TENSOR_PARALLEL": size, "MESH_ENGINE__PAGE_SIZE": page_size}
                prefill = await asyncio.to_thread(tiny_mesh.start_one, "prefill", **settings)
                [worker] = await client.until_usable("prefill")
                assert worker.kv is not None
                assert len(worker.kv.devices) == int(size)
                assert await through_prefill(client, lambda salt: _ask(client, salt)) == expected
                await no_page_is_lost(client)
                assert await asyncio.to_thread(prefill.terminate) == 0
                await until(lambda: not client.prefills.usable())
            assert "prefill instance not used" not in decode.logged()

    tiny_mesh.start("bootstrap", "decode")
    asyncio.run(run())
