"""The real model through the whole mesh: the ids are transformers' own, and the KV really moved."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from components.telemetry.trace_store import TraceStore
from tests.mesh.harness import MeshProcesses, open_client

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(600)]

MODEL: Final = "smollm2-135m"
LONG: Final = 64  # tokens for every sixteenth prompt: transformers takes 70 ms for each
SHORT: Final = 17  # over an edge of a page in any case
PAGE_SIZE: Final = 16

QUESTIONS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Once upon a time",
    "The quick brown fox",
    "Summarise the plot of Hamlet in two sentences.",
    "What is 17 times 23?",
    "Name a mammal that lays eggs.",
    "Der schnelle braune Fuchs springt",
    "SELECT name FROM users WHERE",
    "Why is the sky blue?",
    "🙂 means",
    '{"name": "Ada", "born":',
)
LENGTHS: Final = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 200, 256, 400)  # around pages and chunks of 128


@pytest.fixture(scope="module")
def prompts(real_model_dir: Path) -> list[list[int]]:
    """32: sixteen chats, and sixteen of exact lengths: under a page, exactly a page, several chunks long."""
    tokenizer = AutoTokenizer.from_pretrained(real_model_dir)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    book = tokenizer("\n".join(QUESTIONS * 8))["input_ids"]
    return chats + [book[length : 2 * length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(real_model_dir: Path, prompts: list[list[int]]) -> Iterator[Future[list[list[int]]]]:
    """What transformers generates, greedy, in float32; on one core, beside the mesh that answers one request at a time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(_generate, real_model_dir, prompts)
    torch.set_num_threads(threads)


def _counts(prompts: list[list[int]]) -> list[int]:
    """Tokens to generate for each prompt."""
    return [SHORT if i % 16 else LONG for i in range(len(prompts))]


def _generate(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # greedy, and no end of text
    answers = []
    for prompt, count in zip(prompts, _counts(prompts), strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=2
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def test_prompts_give_transformers_own_ids_one_at_a_time(
    real_mesh: MeshProcesses, prompts: list[list[int]], expected: Future[list[list[int]]]
) -> None:
    """Nine of them, chats and exact lengths."""
    some = [0, *range(1, len(prompts), 4)]

    async def run() -> list[list[int]]:
        async with open_client(real_mesh, MODEL) as client:
            await client.until_usable("prefill")
            counts = _counts(prompts)
            return [await client.generate(prompts[i], counts[i], model=MODEL, salt="alone") for i in some]

    answers, all_expected = asyncio.run(run()), expected.result()
    assert answers == [all_expected[i] for i in some]


def test_32_prompts_give_transformers_own_ids_with_8_in_flight(
    real_mesh: MeshProcesses, prompts: list[list[int]], expected: Future[list[list[int]]]
) -> None:
    async def run() -> list[list[int]]:
        async with open_client(real_mesh, MODEL) as client:
            await client.until_usable("prefill")
            places = asyncio.Semaphore(8)

            async def one(prompt: list[int], count: int) -> list[int]:
                async with places:
                    return await client.generate(prompt, count, model=MODEL, salt="together")

            return list(await asyncio.gather(*map(one, prompts, _counts(prompts))))

    assert asyncio.run(run()) == expected.result()


def test_kv_moves_as_pages_over_nixl_and_decode_computes_no_prompt_token(
    real_mesh: MeshProcesses, prompts: list[list[int]]
) -> None:
    """NIXL's own count of bytes is pages times page bytes, request by request."""

    async def run() -> tuple[int, float, float]:
        async with open_client(real_mesh, MODEL) as client:
            await client.until_usable("prefill")
            [decode] = client.decodes.usable()
            assert decode.kv is not None
            assert decode.http is not None
            before = _metric(decode.http, "prompt_tokens_total")
            for i, prompt in enumerate(prompts):  # a salt each: chats begin alike, and a hit would spare pages
                await client.generate(prompt, 1, model=MODEL, salt=f"moved {i}")
            return decode.kv.layout.page_bytes, before, _metric(decode.http, "prompt_tokens_total")

    store = TraceStore(real_mesh.home)
    page_bytes, before, after = asyncio.run(run())
    assert after == before
    time.sleep(1)  # the last spans are on their way to the disk
    moved = []
    for trace_id in store.last_trace_ids(len(prompts)):
        spans = {s.name: s for s in store.trace(trace_id)}
        length = spans["decode.request"].attributes["kvmesh.prompt_tokens"]
        assert spans["prefill.transfer"].attributes["kvmesh.transfer.bytes"] == -(-length // PAGE_SIZE) * page_bytes
        moved.append(length)
    assert sorted(moved) == sorted(len(p) for p in prompts)


def _metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))
