"""Processes are killed: every request gets the right tokens, and no page is lost."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest

from components.discovery.registry import join_registry
from components.wire.instances import Role
from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.mocks import MAX_TOKENS, MOCK_ENV, no_page_is_lost, one_engine, random_prompts
from tests.mesh.mocks import MODEL as MOCK
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.mesh

MODEL: Final = "tiny"
TRIES: Final = 4  # to kill a process during a request


def test_without_any_prefill_instance_or_without_bootstrap_decode_computes_the_prompt_itself(
    mock_mesh: MeshProcesses,
) -> None:
    prompts = random_prompts(3)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MOCK) as client:
            assert await _answers(client, prompts, "no prefill") == expected
            await asyncio.to_thread(mock_mesh.start_one, "prefill")
            await client.until_usable("prefill")
            assert await _answers(client, prompts, "no bootstrap") == expected
            await no_page_is_lost(client)

    mock_mesh.start("decode")
    asyncio.run(run())


async def _answers(client: Client, prompts: list[list[int]], salt: str) -> list[list[int]]:
    return await client.generate_all(prompts, MAX_TOKENS, salt, model=MOCK)


def test_two_hundred_requests_survive_their_prefill_instances_being_killed(mock_mesh: MeshProcesses) -> None:
    """Each of five prefills is killed while requests are in flight: the client sees only latency."""
    prompts = random_prompts(200)
    expected = one_engine(mock_mesh.home, prompts)
    slow = {"SPEEDUP": "1", "PROMPT_TOKEN_S": "0.00025", "STEP_S": "0"}

    async def run() -> None:
        async with open_client(mock_mesh, MOCK) as client:
            prefills = await asyncio.to_thread(
                lambda: mock_mesh.start(
                    *["prefill"] * 5, **{f"MESH_ENGINE__MOCK__{name}": value for name, value in slow.items()}
                )
            )
            await client.until_usable("prefill", 5)
            answers: list[list[int]] = []
            for round_, victim in enumerate(prefills):
                mine = prompts[round_ * 40 : round_ * 40 + 40]
                for number in range(TRIES):
                    in_flight = asyncio.create_task(_answers(client, mine[:30], f"killed {number}"))
                    await asyncio.sleep(0.15)
                    if not in_flight.done():
                        break
                else:
                    raise AssertionError("no request is in flight at the kill")
                victim.kill()
                answers += await in_flight
                answers += await _answers(client, mine[30:], "killed")
            assert answers == expected
            recomputed = mock_mesh.one("decode").logged().count("computing the prompt here")
            assert recomputed >= 5, "no kill hit a transfer: this test proved nothing"
            await no_page_is_lost(client)
            await asyncio.to_thread(mock_mesh.start_one, "prefill")
            await client.until_usable("prefill")
            assert await _answers(client, prompts[:8], "killed") == expected[:8]
            await no_page_is_lost(client)

    mock_mesh.start("bootstrap", "decode")
    asyncio.run(run())


def test_a_killed_service_leaves_etcd_within_its_lease_and_a_new_one_serves(
    etcd_url: str, nats_url: str, preloaded: Preloaded, namespace: str, tmp_path: Path
) -> None:
    """One of each role, each in a mesh of its own, at the same time."""
    roles: tuple[Role, ...] = ("bootstrap", "prefill", "decode", "frontend")

    def loses(role: Role) -> None:
        home = tmp_path / role
        home.mkdir()
        with MeshProcesses(etcd_url, nats_url, f"{namespace}-{role}", home, "mock", MOCK_ENV, preloaded) as mesh:
            _replaced(role, mesh)

    with ThreadPoolExecutor(len(roles)) as meshes:
        for lost in [meshes.submit(loses, role) for role in roles]:
            lost.result()


def _replaced(role: Role, mesh: MeshProcesses) -> None:
    async def run() -> None:
        async with join_registry(mesh.etcd_url, mesh.namespace, 3.0) as registry:
            book = registry.book
            victim = mesh.one(role)
            others = {w.popen.pid for w in mesh.workers} - {victim.popen.pid}
            [record] = [r for r in book.of_role(role) if r.pid == victim.popen.pid]
            await asyncio.to_thread(victim.kill)
            await until(lambda: book.find(role, record.instance_id) is None)
        restarted = await asyncio.to_thread(mesh.start_one, role)
        async with open_client(mesh, MOCK) as client:
            await client.until_usable("prefill")
            assert len(await client.generate(range(3, 103), 5, model=MOCK)) == 5
        if role == "frontend":
            body = {"model": MOCK, "prompt": "Hi", "max_tokens": 3}
            answer = httpx.post(f"{restarted.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["usage"]["completion_tokens"] <= 3
        assert others <= {w.popen.pid for w in mesh.workers if w.popen.poll() is None}

    mesh.start(*sorted({"bootstrap", "prefill", "decode", role}))
    asyncio.run(run())


def test_prefill_killed_while_its_pages_are_being_written_costs_only_latency(tiny_mesh: MeshProcesses) -> None:
    """The kill falls between two writes of pages, before the aux slot; the log shows it."""
    prompt = [3 + i % 500 for i in range(3900)]  # sixty chunks: pages leave after each

    async def killed(client: Client, salt: str, expected: list[int]) -> str:
        """Return the state of the prompt at a new prefill when that was killed."""
        prefill = await asyncio.to_thread(
            tiny_mesh.start_one, "prefill", MESH_LOG_LEVEL="debug", MESH_ENGINE__MAX_STEP_TOKENS="66"
        )
        await until(lambda: [record.pid for record in client.prefills.usable()] == [prefill.popen.pid])
        answering = asyncio.create_task(client.generate(prompt, 4, model=MODEL, salt=salt))
        async with asyncio.timeout(PATIENCE_S):
            while '"is": "computing"' not in prefill.logged() and not answering.done():
                await asyncio.sleep(0.002)  # the state is short
        await asyncio.sleep(0.02)
        prefill.kill()
        moves = [json.loads(line) for line in prefill.logged().splitlines() if '"of": "prefill ' in line]
        assert await answering == expected
        await no_page_is_lost(client)
        return str(moves[-1]["is"]) if moves else "not sent"

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await client.generate(prompt, 4, model=MODEL, salt="alone")
            states: list[str] = []
            while "computing" not in states:  # a stall of this process misses the moment
                assert len(states) < TRIES, states
                states.append(await killed(client, f"killed {len(states)}", expected))

    tiny_mesh.start("bootstrap", "decode")
    asyncio.run(run())
