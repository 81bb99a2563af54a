"""What the mesh does when its processes are killed: every request is answered, with the right tokens, and no page is lost."""

import asyncio
import json
import random
import time
from pathlib import Path

import httpx
import pytest

from components.discovery.registry import join_registry
from tests.mesh.harness import Client, MeshProcesses, open_client

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

MODEL = "tiny"


def _prompts(count: int, seed: int, longest: int = 600) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


async def _aggregated(client: Client, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What decode alone makes of the prompts."""
    return await asyncio.gather(*(client.generate(p, max_tokens, model=MODEL, salt="alone") for p in prompts))


def _assert_no_page_is_lost(beats: list) -> None:  # type: ignore[type-arg]
    for beat in beats:
        assert beat.free_pages + beat.cached_pages + beat.held_pages == beat.total_pages
        assert beat.held_pages == 0


def test_without_any_prefill_instance_decode_computes_the_prompt_itself(tiny_mesh: MeshProcesses) -> None:
    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            assert len(await client.generate(range(3, 103), 5, model=MODEL)) == 5

    tiny_mesh.start("decode")
    asyncio.run(run())


def test_without_bootstrap_decode_computes_the_prompt_itself(tiny_mesh: MeshProcesses) -> None:
    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            await client.until_usable("prefill")
            assert len(await client.generate(range(3, 103), 5, model=MODEL)) == 5
            _assert_no_page_is_lost(await client.until_quiet())

    tiny_mesh.start("decode", "prefill")
    asyncio.run(run())


def test_two_hundred_requests_survive_their_prefill_instances_being_killed(tiny_mesh: MeshProcesses) -> None:
    """kill -9 while requests are in flight, five times, the last time the only prefill: the client sees only latency."""
    prompts = _prompts(200, seed=1)

    async def answer(client: Client, batch: list[list[int]]) -> list[list[int]]:
        return list(await asyncio.gather(*(client.generate(p, 6, model=MODEL, salt="killed") for p in batch)))

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await _aggregated(client, prompts, 6)
            prefills = await asyncio.to_thread(tiny_mesh.start, *["prefill"] * 5)
            await client.until_usable("prefill", 5)
            answers: list[list[int]] = []
            for round_, victim in enumerate(prefills):
                mine = prompts[round_ * 40 : round_ * 40 + 40]
                in_flight = asyncio.create_task(answer(client, mine[:30]))
                await asyncio.sleep(0.15)
                assert not in_flight.done()
                victim.kill()
                answers += await in_flight
                answers += await answer(client, mine[30:])
            assert answers == expected
            recomputed = tiny_mesh.one("decode").logged().count("computing the prompt here")
            assert recomputed >= 5, "no kill hit a transfer: this test proved nothing"
            _assert_no_page_is_lost(await client.until_quiet())
            await asyncio.to_thread(tiny_mesh.start_one, "prefill")
            await client.until_usable("prefill")
            assert await answer(client, prompts[:8]) == expected[:8]
            _assert_no_page_is_lost(await client.until_quiet())

    tiny_mesh.start("bootstrap", "decode")
    asyncio.run(run())


def test_a_stream_moves_when_its_decode_instance_is_killed(tiny_mesh: MeshProcesses) -> None:
    """No token lost, none doubled: the text goes on elsewhere as if nothing had happened, sampled text too."""

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            await client.until_usable("decode", 2)
            expected = await client.generate(range(3, 40), 900, model=MODEL, seed=7, temperature=0.8, salt="a")
            moving = asyncio.create_task(
                client.generate(range(3, 40), 900, model=MODEL, seed=7, temperature=0.8, salt="b")
            )
            await asyncio.sleep(0.4)
            assert not moving.done()
            busy = await _busy_decode(client)
            next(w for w in tiny_mesh.workers if w.popen.pid == busy).kill()
            assert await moving == expected

    tiny_mesh.start("bootstrap", "prefill", "decode", "decode")
    asyncio.run(run())


async def _busy_decode(client: Client) -> int:
    """Pid of the decode instance that is generating."""
    async with asyncio.timeout(5):
        while True:
            for record in client.decodes.usable():
                beat = client.decodes.last_heartbeat(record.instance_id)
                if beat is not None and beat.num_running:
                    return record.pid
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("role", ["bootstrap", "prefill", "decode", "frontend"])
def test_a_killed_service_leaves_etcd_within_its_lease_and_a_new_one_serves(
    role: str, tiny_mesh: MeshProcesses, tiny_model: Path
) -> None:
    async def run() -> None:
        async with join_registry(tiny_mesh.etcd_url, tiny_mesh.namespace, 3.0) as registry:
            book = registry.book
            victim = tiny_mesh.one(role)
            others = {w.popen.pid for w in tiny_mesh.workers} - {victim.popen.pid}
            [record] = [r for r in book.of_role(role) if r.pid == victim.popen.pid]
            await asyncio.to_thread(victim.kill)
            killed = time.monotonic()
            while book.find(record.instance_id) is not None:
                await asyncio.sleep(0.02)
                assert time.monotonic() - killed < 3.0 + 1.0, "the record outlived its lease"
        restarted = await asyncio.to_thread(tiny_mesh.start_one, role)
        async with open_client(tiny_mesh, MODEL) as client:
            await client.until_usable("prefill")
            assert len(await client.generate(range(3, 103), 5, model=MODEL)) == 5
        if role == "frontend":
            answer = httpx.post(
                f"{restarted.url}/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 3}
            )
            assert answer.json()["usage"]["completion_tokens"] <= 3
        assert others <= {w.popen.pid for w in tiny_mesh.workers if w.popen.poll() is None}

    roles = {"bootstrap", "prefill", "decode", role}
    tiny_mesh.start(*sorted(roles))
    asyncio.run(run())


def test_prefill_killed_while_its_pages_are_being_written_costs_only_latency(tiny_mesh: MeshProcesses) -> None:
    """The kill falls while the sender is sending, before the aux slot: its own log says where it was."""
    prompt = [3 + i % 500 for i in range(3900)]  # sixty chunks: pages leave after each

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await client.generate(prompt, 4, model=MODEL, salt="alone")
            prefill = await asyncio.to_thread(
                tiny_mesh.start_one, "prefill", MESH_LOG_LEVEL="debug", MESH_ENGINE__MAX_STEP_TOKENS="65"
            )
            await client.until_usable("prefill")
            answering = asyncio.create_task(client.generate(prompt, 4, model=MODEL, salt="killed"))
            async with asyncio.timeout(20):
                while '"is": "transferring"' not in prefill.logged():
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            prefill.kill()
            sent = [line for line in prefill.logged().splitlines() if '"of": "send ' in line]
            assert [json.loads(line)["is"] for line in sent] == ["transferring"]
            assert await answering == expected
            beats = await client.until_quiet()
            _assert_no_page_is_lost(beats)

    tiny_mesh.start("bootstrap", "decode")
    asyncio.run(run())
