"""Prefill and decode instances that cut their KV into pages of different sizes, with a model that computes it."""

import asyncio
import random
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest

from components.wire.instances import InstanceRecord
from tests.mesh.conftest import save_windowed
from tests.mesh.harness import Client, MeshProcesses, metric, open_client
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = pytest.mark.mesh

MODEL: Final = "tiny"
MAX_TOKENS: Final = 12
DECODE_PAGE: Final = 64


def _prompts() -> list[list[int]]:
    """36 of up to 600 tokens: families that begin alike for a length around pages of each size, or in the middle of one."""
    draw = random.Random(4)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    families = [tokens(length) for length in (16, 48, 64, 100, 128, 129, 200, 256, 400)]
    return [begin + tokens(draw.randrange(1, 200)) for begin in families for _ in range(4)]


async def _ask(client: Client, prompts: list[list[int]], salt: str) -> list[list[int]]:
    places = asyncio.Semaphore(4)

    async def one(prompt: list[int]) -> list[int]:
        async with places:
            return await client.generate(prompt, MAX_TOKENS, model=MODEL, salt=salt)

    return list(await asyncio.gather(*(one(p) for p in prompts)))


async def _ask_twice(
    client: Client, prompts: list[list[int]], prefill: InstanceRecord, salt: str
) -> tuple[Any, Any, float]:
    """Both rounds' answers, and the bytes that prefill sent."""
    before = _sent_bytes(prefill)
    first, second = await _ask(client, prompts, salt), await _ask(client, prompts, salt)
    return first, second, _sent_bytes(prefill) - before


def _sent_bytes(prefill: InstanceRecord) -> float:
    return metric(prefill.http, "kvmesh_kv_transfer_bytes_total")


@pytest.mark.parametrize("window", [None, 100])
def test_tokens_are_those_of_aggregated_serving(
    tiny_mesh: MeshProcesses, tmp_path_factory: pytest.TempPathFactory, window: int | None
) -> None:
    """With smaller pages at prefill, then with larger ones; pages that every layer has left are not sent.

    The second round finds all prompts in decode's prefix cache but for their last pages, and those move.
    """
    if window is not None:
        tiny_mesh.env = {**tiny_mesh.env, "MESH_ENGINE__LOAD_FORMAT": "dummy"}
        tiny_mesh.model = str(save_windowed(tmp_path_factory.mktemp("windowed"), window))
    prompts = _prompts()
    most = sum(-(-len(p) // DECODE_PAGE) - max(0, len(p) - (window or len(p)) - 1) // DECODE_PAGE for p in prompts)
    assert any(a[:100] == b[:100] for a, b in pairwise(prompts))

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await _ask(client, prompts, "aggregated")
            for page_size in (16, 128):
                prefill = await asyncio.to_thread(tiny_mesh.start_one, "prefill", MESH_ENGINE__PAGE_SIZE=str(page_size))
                [worker] = await client.until_usable("prefill")
                assert worker.kv is not None
                assert worker.kv.layout.page_size == page_size
                first, second, sent = await through_prefill(client, partial(_ask_twice, client, prompts, worker))
                assert first == second == expected
                for beat in await client.until_quiet():
                    assert beat.free_pages + beat.cached_pages == beat.total_pages
                assert 0 < sent <= 2 * most * DECODE_PAGE * worker.kv.layout.page_bytes / page_size
                assert await asyncio.to_thread(prefill.terminate) == 0
                await until(lambda: not client.prefills.usable())
        assert "prefill instance not used" not in tiny_mesh.one("decode").logged()

    tiny_mesh.start("bootstrap", "decode", MESH_ENGINE__PAGE_SIZE=str(DECODE_PAGE), MESH_ENGINE__MAX_STEP_TOKENS="100")
    asyncio.run(run())
