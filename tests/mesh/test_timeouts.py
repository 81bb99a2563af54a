"""Waits between prefill and decode that take too long end on both sides, and the client sees only latency."""

import asyncio
import time

import pytest

from tests.mesh.harness import MeshProcesses, open_client
from tests.mesh.mocks import MODEL, NO_COST, no_page_is_lost
from tests.waiting import until

pytestmark = pytest.mark.mesh


def test_a_prompt_for_which_decode_has_no_pages_in_time_is_given_up_by_prefill_and_decode(
    mock_mesh: MeshProcesses,
) -> None:
    """A stream of decode holds nearly all of its pages for about four seconds."""
    paced = {**NO_COST, "MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.01"}

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            longest = asyncio.create_task(client.generate([i % 250 for i in range(480)], 500, model=MODEL))
            await until(lambda: '"is": "transfer"' in decode.logged(), decode.logged)
            assert len(await client.generate([7] * 600, 5, model=MODEL)) == 5
            assert len(await longest) == 500
            gave_up = "decode did not offer its pages within 0.5 s"
            assert gave_up in prefill.logged()
            assert gave_up in decode.logged(), "prefill reports it"
            await no_page_is_lost(client)

    mock_mesh.start("bootstrap")
    prefill = mock_mesh.start_one("prefill", MESH_BOOTSTRAP_TIMEOUT_S="0.5")
    pool = {"MESH_ENGINE__NUM_PAGES": "64", "MESH_ENGINE__RESERVE_TOKENS": "0", "MESH_LOG_LEVEL": "debug"}
    decode = mock_mesh.start_one("decode", **paced, **pool)
    asyncio.run(run())


def test_a_transfer_that_takes_too_long_is_given_up(mock_mesh: MeshProcesses) -> None:
    """Prefill would need four seconds for this prompt, decode none."""
    slow = {
        **NO_COST,
        "MESH_ENGINE__MOCK__SPEEDUP": "1",
        "MESH_ENGINE__MOCK__STEP_S": "0",
        "MESH_ENGINE__MOCK__PROMPT_TOKEN_S": "0.04",
    }

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            expected = await client.generate(range(100), 5, model=MODEL, salt="alone")
            prefill = await asyncio.to_thread(mock_mesh.start_one, "prefill", **slow)
            await client.until_usable("prefill")
            started = time.monotonic()
            assert await client.generate(range(100), 5, model=MODEL, salt="late") == expected
            assert time.monotonic() - started >= 0.5
            assert "in 0.5 s" in decode.logged(), "decode did not wait for prefill, which would need four seconds"
            await no_page_is_lost(client)
            assert "transfer failed" in prefill.logged()

    _, decode = mock_mesh.start("bootstrap", "decode", MESH_TRANSFER_TIMEOUT_S="0.5")
    asyncio.run(run())
