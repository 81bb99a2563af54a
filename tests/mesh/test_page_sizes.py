"""Prefill and decode instances with pages of different sizes, with a model that computes its KV."""

import asyncio
import random
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest

from components.wire.instances import InstanceRecord
from tests.mesh.conftest import save_windowed
from tests.mesh.harness import Client, MeshProcesses, metric, open_client
from tests.mesh.mocks import no_page_is_lost
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = pytest.mark.mesh

MODEL: Final = "tiny"
MAX_TOKENS: Final = 12
DECODE_PAGE: Final = 64


def _prompts() -> list[list[int]]:
    """36 of up to 600 tokens, in families whose common prefix ends near an edge of a page or inside one."""
    draw = random.Random(4)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    families = [tokens(length) for length in (16, 48, 64, 100, 128, 129, 200, 256, 400)]
    return [begin + tokens(draw.randrange(1, 200)) for begin in families for _ in range(4)]


async def _ask(client: Client, prompts: list[list[int]], salt: str) -> list[list[int]]:
    return await client.generate_all(prompts, MAX_TOKENS, salt, model=MODEL, in_flight=4)


async def _ask_twice(
    client: Client, prompts: list[list[int]], prefill: InstanceRecord, salt: str
) -> tuple[Any, Any, float]:
    """Return both rounds' answers, and the bytes that prefill sent."""
    before = _sent_bytes(prefill)
    first, second = await _ask(client, prompts, salt), await _ask(client, prompts, salt)
    return first, second, _sent_bytes(prefill) - before


def _sent_bytes(prefill: InstanceRecord) -> float:
    return metric(prefill.http, "kvmesh_kv_transfer_bytes_total")


@pytest.mark.parametrize("window", [None, 100])
def test_tokens_are_those_of_aggregated_serving(
    tiny_mesh: MeshProcesses, tmp_path_factory: pytest.TempPathFactory, window: int | None
) -> None:
    """Pages of prefill are smaller than decode's, then larger. Pages outside of the window are not sent.

    In the second round decode has all pages cached but the last ones of the prompts, which are sent.
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
                await no_page_is_lost(client)
                assert 0 < sent <= 2 * most * DECODE_PAGE * worker.kv.layout.page_bytes / page_size
                assert await asyncio.to_thread(prefill.terminate) == 0
                await until(lambda: not client.prefills.usable())
        assert "prefill instance not used" not in tiny_mesh.one("decode").logged()

    tiny_mesh.start("bootstrap", "decode", MESH_ENGINE__PAGE_SIZE=str(DECODE_PAGE), MESH_ENGINE__MAX_STEP_TOKENS="100")
    asyncio.run(run())


def test_pages_of_8_bit_floats_are_received_from_prefill_with_such_pages_only(tiny_mesh: MeshProcesses) -> None:
    prompts = _prompts()[:12]

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await _ask(client, prompts, "aggregated")
            other = await asyncio.to_thread(tiny_mesh.start_one, "prefill", MESH_ENGINE__KV_DTYPE="auto")
            assert await _ask(client, prompts, "beside a prefill of float32") == expected
            decode = tiny_mesh.one("decode")
            await until(lambda: "dtype: fp8_e4m3 here, float32 there" in decode.logged())
            assert await asyncio.to_thread(other.terminate) == 0
            await until(lambda: not client.prefills.usable())
            await asyncio.to_thread(tiny_mesh.start_one, "prefill", MESH_ENGINE__PAGE_SIZE="16")
            [worker] = await client.until_usable("prefill")
            first, second, sent = await through_prefill(client, partial(_ask_twice, client, prompts, worker))
            assert first == second == expected
            await no_page_is_lost(client)
            assert worker.kv is not None
            layout = worker.kv.layout
            assert layout.row_bytes == layout.head_dim, "a byte for each number"
            pages = sum(-(-len(ids) // DECODE_PAGE) * DECODE_PAGE // layout.page_size for ids in prompts)
            assert 0 < sent <= 2 * pages * layout.page_bytes

    tiny_mesh.env = {**tiny_mesh.env, "MESH_ENGINE__KV_DTYPE": "fp8_e4m3"}
    tiny_mesh.start("bootstrap", "decode", MESH_ENGINE__PAGE_SIZE=str(DECODE_PAGE), MESH_ENGINE__MAX_STEP_TOKENS="100")
    asyncio.run(run())
