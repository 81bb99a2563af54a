"""KV that changes on its way: real processes, real NIXL, and a decode whose pool is damaged."""

import asyncio
import json
import random

import httpx
import pytest

from tests.mesh.harness import MeshProcesses, Worker, metrics_of, open_client
from tests.mesh.mocks import MODEL, no_page_is_lost
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.mesh

DAMAGED = "tests.mesh.corrupting_decode"
draw = random.Random(5)
PROMPTS = [[draw.randrange(256) for _ in range(draw.randrange(40, 300))] for _ in range(16)]


RECOMPUTED = 'kvmesh_prompts_computed_on_decode_total{reason="transfer_failed"}'


def _metric(url: str | None, name: str) -> float:
    return float(next((line.split()[1] for line in metrics_of(url) if line.startswith(f"{name} ")), 0.0))


def _ask(mesh: MeshProcesses, decode: Worker) -> tuple[list[list[int]], float, float]:
    """Return this decode's tokens, its corrupt transfers and the prompts that it computed itself."""

    async def run() -> tuple[list[list[int]], float, float]:
        async with open_client(mesh, MODEL) as client:
            await client.until_usable("prefill")
            answers = await client.generate_all(PROMPTS, 12, model=MODEL)
            await no_page_is_lost(client)
            [record] = client.decodes.usable()
            assert record.pid == decode.popen.pid
            corrupt = _metric(record.http, 'kvmesh_kv_transfers_total{cause="KvCorrupt",outcome="failed"}')
            return answers, corrupt, _metric(record.http, RECOMPUTED)

    result = asyncio.run(run())
    decode.terminate()  # the next one must not find it in etcd
    return result


def test_damaged_pages_change_the_text_unless_they_are_verified(mock_mesh: MeshProcesses) -> None:
    verified = {"MESH_VERIFY_KV": "true"}  # a name for the whole mesh; decode alone needs it
    count = len(PROMPTS)
    # decode's pages have 16 tokens
    mock_mesh.start("bootstrap", "prefill", MESH_PREFILL_ENGINE__PAGE_SIZE="64", **verified)
    right, corrupt, recomputed = _ask(mock_mesh, mock_mesh.start_one("decode", **verified))
    assert (corrupt, recomputed) == (0, 0)
    mock_mesh.modules["decode"] = DAMAGED
    wrong, corrupt, recomputed = _ask(mock_mesh, mock_mesh.start_one("decode", DAMAGE="mark"))
    assert (corrupt, recomputed) == (0, 0)
    assert all(a != b for a, b in zip(right, wrong, strict=True)), "without verification the damage must show"
    for damage in ("mark", "bit"):
        decode = mock_mesh.start_one("decode", DAMAGE=damage, MESH_DECODE_VERIFY_KV="true")
        assert _ask(mock_mesh, decode) == (right, count, count)
        lines = [json.loads(line) for line in decode.logged().splitlines()]
        damaged = [line for line in lines if "pages did not arrive as prefill sent them" in line.get("cause", "")]
        assert sum(line.get("repeated", 1) for line in damaged) == count


def test_where_failures_are_asked_for_damage_is_a_502_that_says_so_and_no_other_decode_is_tried(
    mock_mesh: MeshProcesses,
) -> None:
    verified = {"MESH_DECODE_VERIFY_KV": "true", "MESH_DECODE_ON_TRANSFER_FAILURE": "fail", "DAMAGE": "bit"}
    mock_mesh.modules["decode"] = DAMAGED
    *_, frontend = mock_mesh.start("bootstrap", "prefill", "decode", "decode", "frontend", **verified)
    body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True}

    async def run() -> None:
        async with (
            open_client(mock_mesh, MODEL) as client,
            httpx.AsyncClient(base_url=frontend.url, timeout=PATIENCE_S) as http,
        ):
            await client.until_usable("prefill")
            await client.until_usable("decode", 2)
            for count, stream in enumerate([False, True, False], start=1):
                answer = await http.post("/v1/completions", json={**body, "prompt": "abc " * 50, "stream": stream})
                assert answer.status_code == 502
                error = answer.json()["error"]
                assert error["code"] == "kv_transfer_failed"
                assert error["message"].startswith(
                    "The prompt's KV was not received from its prefill instance: it was corrupted on the way."
                )
                failures = [
                    _metric(r.http, 'kvmesh_kv_transfers_total{cause="KvCorrupt",outcome="failed"}')
                    for r in client.decodes.usable()
                ]
                assert sum(failures) == count, "each request failed once, on one decode"
            await no_page_is_lost(client)

    asyncio.run(run())
