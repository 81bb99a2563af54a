"""Decodes with and without speculative decoding send the same tokens, also when a stream moves from one to the other."""

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoTokenizer

from tests.mesh.harness import Client, MeshProcesses, Worker, metric, open_client
from tests.mesh.preloaded import Preloaded
from tests.mesh.test_moved_real_streams import ENV, KILLED_AT, MODEL, TOKENS, tokens_of
from tests.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.model]

CODE: Final = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth
"""
QUESTION: Final = [{"role": "user", "content": f"Add a docstring to each function, and repeat the code:\n{CODE}"}]
PLAIN: Final = {"MESH_ENGINE__SPECULATIVE_TOKENS": "0"}


@pytest.fixture
def mesh(
    etcd_url: str, nats_url: str, preloaded: Preloaded, real_model_dir: Path, tmp_path: Path
) -> Iterator[MeshProcesses]:
    name = f"guesses-{secrets.token_hex(3)}"
    with MeshProcesses(etcd_url, nats_url, name, tmp_path, str(real_model_dir), ENV, preloaded) as mesh:
        mesh.start("bootstrap", "prefill")
        yield mesh


async def only(client: Client, worker: Worker) -> None:
    """Wait until `worker` is the one usable decode."""
    await until(lambda: [record.pid for record in client.decodes.usable()] == [worker.popen.pid])


def test_a_stream_has_the_same_tokens_wherever_they_are_guessed(mesh: MeshProcesses, real_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    prompt_ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]

    async def answers(client: Client) -> list[list[int]]:
        return [[token async for token in tokens_of(client, prompt_ids, how)] for how in (0.0, 0.8)]

    async def run() -> None:
        plain = mesh.start_one("decode", **PLAIN)
        async with open_client(mesh, MODEL) as client:
            await client.until_usable("prefill", 1)
            await only(client, plain)
            expected = await answers(client)
            plain.kill()
            guessing = mesh.start_one("decode")  # by default
            await only(client, guessing)
            assert await answers(client) == expected
            url = client.decodes.usable()[0].http
            accepted = metric(url, "kvmesh_spec_decode_num_accepted_tokens_total")
            assert accepted > TOKENS / 4
            assert metric(url, "kvmesh_generation_tokens_total") == pytest.approx(2 * TOKENS, abs=2)

            moved: list[int] = []
            async with aclosing(tokens_of(client, prompt_ids, 0.0)) as tokens:
                async for token in tokens:
                    moved.append(token)
                    if len(moved) >= KILLED_AT and guessing.popen.poll() is None:
                        mesh.start_one("decode", **PLAIN)
                        guessing.kill()
            assert moved == expected[0]

    asyncio.run(run())
