"""A follower of prefill or of decode is killed under load: the instance ends, and every token is that of one device.

Models in float32: a tiny one, and the default one, whose heads two ranks do not divide.
"""

import asyncio
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from components.wire.instances import InstanceRecord
from tests.mesh.harness import Client, MeshProcesses, Worker, open_client
from tests.mesh.lost_ranks import ends_with_a_follower
from tests.mesh.preloaded import Preloaded
from tests.mesh.through_prefill import through_prefill
from tests.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.faults]

MAX_TOKENS: Final = 60
IN_FLIGHT: Final = 4
HOW: Final = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9})
SMOLLM: Final = "smollm2-135m"


def _prompts(lengths: range) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 512) for _ in range(length)] for length in lengths]


async def _ask(client: Client, model: str, prompts: list[list[int]], salt: str) -> list[list[int]]:
    """Send each prompt with each of `HOW`."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(prompt: list[int], how: dict[str, float]) -> list[int]:
        async with places:
            return await client.generate(prompt, MAX_TOKENS, model=model, salt=salt, **how)

    return list(await asyncio.gather(*(one(prompt, how) for prompt in prompts for how in HOW)))


async def _until_computing(client: Client, record: InstanceRecord) -> None:
    alive = client.decodes if record.role == "decode" else client.prefills
    await until(lambda: (beat := alive.last_heartbeat(record.instance_id)) is not None and beat.busy)


async def _loses_a_rank(
    client: Client, mesh: MeshProcesses, worker: Worker, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Kill a rank while requests run there."""
    role = "decode" if worker.role == "decode" else "prefill"
    [record] = [r for r in await client.until_usable(role) if r.pid == worker.popen.pid]
    answers = asyncio.create_task(_ask(client, mesh.env["MESH_SERVED_MODEL_NAME"], prompts, f"{role} loses a rank"))
    await _until_computing(client, record)
    await ends_with_a_follower(worker, record)
    assert await answers == expected


def _run(mesh: MeshProcesses, prefill: int, decode: int, lengths: range, kill: tuple[str, ...]) -> None:
    """The first decode, on one device, gives the expected tokens and receives the moved streams."""
    prompts, model = _prompts(lengths), mesh.env["MESH_SERVED_MODEL_NAME"]

    async def run() -> None:
        async with open_client(mesh, model) as client:
            expected = await _ask(client, model, prompts, "alone")
            workers: dict[str, Worker] = {}
            for role, size in (("decode", decode), ("prefill", prefill)):
                ranks = {"MESH_ENGINE__TENSOR_PARALLEL": str(size)}
                workers[role] = await asyncio.to_thread(mesh.start_one, role, **ranks)
            await client.until_usable("decode", 2)
            await client.until_usable("prefill")
            assert await through_prefill(client, lambda salt: _ask(client, model, prompts, salt)) == expected
            for role in kill:
                await _loses_a_rank(client, mesh, workers[role], prompts, expected)

    mesh.start("bootstrap", "decode")
    asyncio.run(run())


@pytest.mark.parametrize(
    ("prefill", "decode", "kill"),
    [(1, 2, ("decode",)), (2, 1, ("prefill",)), (2, 2, ("prefill", "decode"))],
    ids=["1 to 2", "2 to 1", "2 to 2"],
)
def test_tokens_are_those_of_one_device(
    tiny_mesh: MeshProcesses, prefill: int, decode: int, kill: tuple[str, ...]
) -> None:
    _run(tiny_mesh, prefill, decode, range(20, 420, 50), kill)


@pytest.fixture
def smollm_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, real_model_dir: Path, tmp_path: Path
) -> Iterator[MeshProcesses]:
    env = {
        "MESH_SERVED_MODEL_NAME": SMOLLM,
        "MESH_ENGINE__DTYPE": "float32",
        "MESH_ENGINE__NUM_PAGES": "512",
        "MESH_ENGINE__MAX_STEP_TOKENS": "128",
        "MESH_ENGINE__THREADS": "1",
        "MESH_ENGINE__COMPILE": "off",
        "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
        "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
        "MESH_LEASE_TTL_S": "3",
    }
    name = f"ranks-{secrets.token_hex(3)}"
    with MeshProcesses(etcd_url, nats_url, name, tmp_path, str(real_model_dir), env, preloaded) as mesh:
        yield mesh


@pytest.mark.model
@pytest.mark.parametrize(
    ("prefill", "decode", "kill"),
    [(1, 2, ("decode",)), (2, 1, ("prefill",)), (2, 2, ("prefill", "decode")), (3, 2, ("prefill",))],
    ids=["1 to 2", "2 to 1", "2 to 2", "3 to 2"],
)
def test_tokens_of_the_default_model_are_those_of_one_device(
    smollm_mesh: MeshProcesses, prefill: int, decode: int, kill: tuple[str, ...]
) -> None:
    """With two ranks, one has one of the three KV heads and the other has two."""
    _run(smollm_mesh, prefill, decode, range(40, 240, 100), kill)
