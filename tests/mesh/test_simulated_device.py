"""Prefill and decode on a simulated GPU: pages move as they would between two devices."""

import asyncio
from functools import partial
from typing import Final

import pytest
import torch

from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.through_prefill import through_prefill

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA"),
]

MODEL: Final = "tiny"
PROMPTS: Final = [[3 + (7 * i + 31 * k) % 500 for i in range(length)] for k, length in enumerate((5, 64, 130))]
WORKERS: Final = {
    "MESH_ENGINE__DEVICE": "cuda:0",
    "MESH_ENGINE__ATTENTION": "torch",
    "MESH_ENGINE__COMPILE": "off",
    "MESH_ENGINE__NUM_PAGES": "64",
    "MESH_ENGINE__MAX_RUNNING": "4",  # Triton's interpreter takes a second to sample 16 rows
    "MESH_ENGINE__MAX_STEP_TOKENS": "64",
    "TRITON_INTERPRET": "1",
}


async def ask(client: Client, salt: str) -> list[list[int]]:
    return [await client.generate(prompt, 8, model=MODEL, salt=salt) for prompt in PROMPTS]


def test_prompts_computed_on_another_device_give_the_same_tokens(tiny_mesh: MeshProcesses) -> None:
    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            expected = await ask(client, "aggregated")
            await asyncio.to_thread(tiny_mesh.start_one, "prefill", **WORKERS, SIMULATED_MODULE="services.prefill")
            await client.until_usable("prefill")
            assert await through_prefill(client, partial(ask, client)) == expected

    tiny_mesh.modules = dict.fromkeys(("decode", "prefill"), "tests.mesh.simulated_worker")
    tiny_mesh.start("bootstrap")
    tiny_mesh.start_one("decode", **WORKERS, SIMULATED_MODULE="services.decode")
    asyncio.run(run())
