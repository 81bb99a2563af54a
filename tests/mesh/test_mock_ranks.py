"""Mock engines on unequal numbers of ranks: follower processes with pools and NIXL agents of their own."""

import asyncio
from typing import Final

import pytest

from components.wire.instances import InstanceRecord
from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.lost_ranks import ends_with_a_follower
from tests.mesh.mocks import MAX_TOKENS, MODEL, no_page_is_lost, one_engine, random_prompts
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = pytest.mark.mesh

PROMPTS: Final = random_prompts(100)
SLOW: Final = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.02"}


async def _ask(client: Client, salt: str) -> list[list[int]]:
    return await client.generate_all(PROMPTS, MAX_TOKENS, salt, model=MODEL)


def _ranks(role: str, number: int, kv_heads: int, page_size: int) -> dict[str, str]:
    prefix = f"MESH_{role.upper()}_ENGINE__"
    sizes = {"TENSOR_PARALLEL": number, "MOCK__KV_HEADS": kv_heads, "PAGE_SIZE": page_size}
    return {f"{prefix}{name}": str(value) for name, value in sizes.items()}


async def _records(client: Client, prefill: int, decode: int) -> dict[str, InstanceRecord]:
    [source] = await client.until_usable("prefill")
    [target] = await client.until_usable("decode")
    assert source.kv is not None
    assert target.kv is not None
    assert (len(source.kv.devices), len(target.kv.devices)) == (prefill, decode)
    return {"prefill": source, "decode": target}


async def _all_right(client: Client, mesh: MeshProcesses, expected: list[list[int]]) -> None:
    assert await through_prefill(client, lambda salt: _ask(client, salt)) == expected
    await no_page_is_lost(client)
    assert "prefill instance not used" not in mesh.one("decode").logged()


def test_from_two_ranks_to_four_and_prefill_loses_one(mock_mesh: MeshProcesses) -> None:
    """A rank of prefill has two heads, one of decode has one."""
    expected = one_engine(mock_mesh.home, PROMPTS)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            records = await _records(client, 2, 4)
            await _all_right(client, mock_mesh, expected)
            streams = asyncio.create_task(_ask(client, "prefill loses a rank"))
            await asyncio.sleep(0.05)
            await ends_with_a_follower(mock_mesh.one("prefill"), records["prefill"])
            assert await streams == expected, "decode computes what prefill does not"

    mock_mesh.start("bootstrap", "decode", "prefill", **_ranks("prefill", 2, 4, 16), **_ranks("decode", 4, 4, 16))
    asyncio.run(run())


def test_from_four_ranks_to_two_and_decode_loses_one(mock_mesh: MeshProcesses) -> None:
    """Two ranks of prefill have the same head, and pages are of unequal sizes."""
    expected = one_engine(mock_mesh.home, PROMPTS)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            records = await _records(client, 4, 2)
            await _all_right(client, mock_mesh, expected)
            await asyncio.to_thread(mock_mesh.start_one, "decode", MESH_ENGINE__MOCK__KV_HEADS="2")
            await client.until_usable("decode", 2)
            streams = asyncio.create_task(_ask(client, "decode loses a rank"))
            await asyncio.sleep(0.05)
            await ends_with_a_follower(mock_mesh.one("decode"), records["decode"])
            assert await streams == expected, "streams move, to an instance on one device"

    mock_mesh.start("bootstrap", "decode", "prefill", **_ranks("prefill", 4, 2, 16), **_ranks("decode", 2, 2, 32))
    asyncio.run(run())


def test_streams_of_an_instance_that_drains_move_at_once_when_it_loses_a_rank(mock_mesh: MeshProcesses) -> None:
    """They waited until the end of the drain: a draining worker did not notice that its engine had ended."""

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            [record] = await client.until_usable("decode")
            streams = asyncio.create_task(client.generate(PROMPTS[0], 400, model=MODEL, salt="drains"))
            await until(lambda: any(beat.num_running for beat in client.beats("decode")))
            draining = mock_mesh.one("decode")
            await asyncio.to_thread(
                mock_mesh.start_one, "decode", **{**SLOW, "MESH_DECODE_ENGINE__TENSOR_PARALLEL": "1"}
            )
            await client.until_usable("decode", 2)
            draining.popen.terminate()
            await until(lambda: "draining" in draining.logged())
            await ends_with_a_follower(draining, record)
            assert len(await streams) == 400

    mock_mesh.start("decode", **_ranks("decode", 2, 2, 16), **SLOW, MESH_DECODE_DRAIN_TIMEOUT_S="1000")
    asyncio.run(run())
