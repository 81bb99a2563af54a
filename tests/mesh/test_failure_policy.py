"""`--on-transfer-failure fail` when a prefill instance is killed: its requests get one error, others continue."""

import asyncio

import httpx
import pytest

from tests.mesh.harness import MeshProcesses, open_client
from tests.mesh.mocks import MODEL, NO_COST, no_page_is_lost
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.mesh

TOKENS = 1000  # ten seconds: silence is noticed in two


def test_a_killed_prefill_fails_its_requests_with_a_502_and_no_stream_that_has_begun(
    mock_mesh: MeshProcesses,
) -> None:
    paced = {**NO_COST, "MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.01"}
    mock_mesh.start("bootstrap")
    frontend = mock_mesh.start_one("frontend")
    mock_mesh.start_one("decode", MESH_DECODE_ON_TRANSFER_FAILURE="fail", **paced)
    slow = {**paced, "MESH_ENGINE__MOCK__STEP_S": "0", "MESH_ENGINE__MOCK__PROMPT_TOKEN_S": "0.02"}

    async def run() -> None:
        async with (
            open_client(mock_mesh, MODEL) as client,
            httpx.AsyncClient(base_url=frontend.url, timeout=PATIENCE_S) as http,
        ):
            prefill = await asyncio.to_thread(mock_mesh.start_one, "prefill", **slow)
            [record] = await client.until_usable("prefill")
            begun = asyncio.create_task(client.generate([5] * 20, TOKENS, model=MODEL))
            await until(lambda: any(beat.num_running for beat in client.beats("decode")), lambda: [*client.beats()])
            body = {"model": MODEL, "prompt": "a" * 200, "max_tokens": 5}
            failing = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            await until(
                lambda: client.prefills.prompt_load(record.instance_id).queued_tokens > 2 * 200, "all three there"
            )
            prefill.kill()
            for answer in await asyncio.gather(*failing):
                assert answer.status_code == 502
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "kv_transfer_failed")
                assert "was not received from its prefill instance: the instance was lost." in error["message"]
            assert not begun.done()
            assert len(await begun) == TOKENS
            await no_page_is_lost(client)

    asyncio.run(run())
