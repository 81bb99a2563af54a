"""Decode is killed in the middle of a stream of the default model in bfloat16: another decode sends the same tokens on."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from transformers import AutoTokenizer

from components.messaging.clocks import now_ms
from components.wire.sampling import SamplingParams
from services.frontend.ports import Prompt
from tests.mesh.harness import Client, MeshProcesses, Worker, open_client, tracer
from tests.mesh.preloaded import Preloaded
from tests.services.frontend.reading import reading
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.mesh, pytest.mark.model]

MODEL: Final = "smollm2-135m"
TOKENS: Final = 100
KILLED_AT: Final = 30
QUESTION: Final = [{"role": "user", "content": "Tell me a very long story about a mouse."}]

ENV: Final = {
    "MESH_SERVED_MODEL_NAME": MODEL,
    "MESH_ENGINE__DTYPE": "bfloat16",
    "MESH_ENGINE__THREADS": "1",
    "MESH_ENGINE__COMPILE": "off",
    "MESH_LEASE_TTL_S": "3",
}


@pytest.fixture(scope="module")
def bfloat16_mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshProcesses]:
    """Two decodes, which compute prompts themselves."""
    home = tmp_path_factory.mktemp("bfloat16")
    name = f"bfloat16-{secrets.token_hex(3)}"
    with MeshProcesses(etcd_url, nats_url, name, home, str(real_model_dir), ENV, preloaded) as mesh:
        mesh.start("decode", "decode")
        yield mesh


async def tokens_of(client: Client, prompt_ids: list[int], temperature: float) -> AsyncGenerator[int, None]:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True)
    prompt = Prompt(uuid4().hex, MODEL, prompt_ids, sampling, uuid4().hex, now_ms() + 120_000)
    with tracer.start_as_current_span("test"):
        async with reading(client.mesh, prompt) as [stream]:
            async for delta in stream:
                for token_id in delta.token_ids:
                    yield token_id


async def busy_decode(client: Client, mesh: MeshProcesses) -> Worker:
    """Return the decode that has the stream."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in client.decodes.usable():
                beat = client.decodes.last_heartbeat(record.instance_id)
                if beat is not None and beat.num_running:
                    return next(worker for worker in mesh.workers if worker.popen.pid == record.pid)
            await asyncio.sleep(0.005)  # before the stream ends


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_killed_decode_changes_no_token_of_its_stream(
    bfloat16_mesh: MeshProcesses, real_model_dir: Path, temperature: float
) -> None:
    """In bfloat16 the tokens diverged: the other decode computed earlier tokens as a prompt, with other rounding."""

    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    prompt_ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]

    async def run() -> None:
        async with open_client(bfloat16_mesh, MODEL) as client:
            await client.until_usable("decode", 2)
            undisturbed = [token_id async for token_id in tokens_of(client, prompt_ids, temperature)]
            assert len(undisturbed) == TOKENS
            moved: list[int] = []
            victim = None
            async with aclosing(tokens_of(client, prompt_ids, temperature)) as tokens:
                async for token_id in tokens:
                    moved.append(token_id)
                    if victim is None and len(moved) >= KILLED_AT:
                        victim = await busy_decode(client, bfloat16_mesh)
                        victim.kill()
            assert victim is not None
            assert moved == undisturbed

    if sum(worker.popen.poll() is None for worker in bfloat16_mesh.workers) < 2:
        bfloat16_mesh.start_one("decode")
    asyncio.run(run())
