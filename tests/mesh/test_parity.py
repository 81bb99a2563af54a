"""A mesh gives the same tokens, branches and log-probabilities as one engine that does both phases."""

import asyncio
import random
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

from components.wire.instances import InstanceRecord
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.build import build_engine
from engine.config import EngineConfig
from tests.mesh.harness import Answer, MeshProcesses, metrics_of, open_client
from tests.mesh.mocks import aggregated, no_page_is_lost
from tests.mesh.through_prefill import through_prefill

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

MODEL: Final = "tiny"
PAGE_SIZE: Final = 16
COUNT: Final = 200
TOLERANCE: Final = 1e-5  # float32, logits near 6: other chunks and batches change the order of sums
EDGES: Final = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129, 200, 256, 300)  # around pages and chunks of 128
HOW: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.5, "logprobs": 20},
    {"temperature": 1.2, "n": 2, "logprobs": 2, "presence_penalty": 0.3},
    {"temperature": 0.0, "n": 2, "logprobs": 1, "repetition_penalty": 1.3},
)


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, each with a seed of its own. Every third one begins like the one before it."""
    draw, lengths, how = random.Random(8), cycle(EDGES), cycle(HOW)
    requests: list[tuple[list[int], SamplingParams]] = []
    for i in range(COUNT):
        shared = requests[-1][0][: draw.randrange(len(requests[-1][0]) + 1)] if i % 3 == 2 else []
        prompt = shared + [draw.randrange(3, 512) for _ in range(next(lengths))]
        requests.append((prompt, SamplingParams(max_tokens=6, seed=i, ignore_eos=True, **next(how))))
    return requests


def distance(mine: TokenLogprobs, theirs: TokenLogprobs) -> float:
    """Return the largest difference. An alternative that `theirs` lacks counts as its last one."""
    assert len(mine.top) == len(theirs.top)
    there = dict(theirs.top)
    last = theirs.top[-1][1] if theirs.top else 0.0
    apart = [abs(logprob - there.get(token_id, last)) for token_id, logprob in mine.top]
    return max([abs(mine.logprob - theirs.logprob), *apart])


def test_200_prompts_give_what_one_engine_gives(tiny_mesh: MeshProcesses, tiny_model: Path) -> None:
    tiny_mesh.start("bootstrap", "prefill", "decode", MESH_TRANSFER_TIMEOUT_S="60")  # no prefill is killed here
    requests = make_requests()
    config = EngineConfig(dtype="float32", num_pages=2048, max_step_tokens=128, threads=1, compile="off")
    expected = aggregated(build_engine(str(tiny_model), config, tiny_mesh.home), requests)

    async def run() -> None:
        async with open_client(tiny_mesh, MODEL) as client:
            [prefill] = await client.until_usable("prefill")
            [decode] = client.decodes.usable()
            places = asyncio.Semaphore(24)

            async def ask(prompt: list[int], sampling: SamplingParams, salt: str) -> list[Answer]:
                async with places:
                    return await client.branches(prompt, sampling, model=MODEL, salt=salt)

            async def ask_all(salt: str) -> tuple[list[list[Answer]], list[float]]:
                """Return the answers, and the growth of the figures."""
                before = await _figures(prefill, decode)
                answers = await asyncio.gather(*(ask(*request, salt) for request in requests))
                await no_page_is_lost(client)
                grown = [now - then for now, then in zip(await _figures(prefill, decode), before, strict=True)]
                return list(answers), grown

            found, (transfers, sent_bytes, kept) = await through_prefill(client, ask_all)
            worst = 0.0
            for i, (answers, right) in enumerate(zip(found, expected, strict=True)):
                assert [a.token_ids for a in answers] == [a.token_ids for a in right], f"prompt {i}"
                assert [a.finish for a in answers] == ["length"] * len(right)
                with_logprobs = requests[i][1].logprobs is not None
                assert all(len(a.logprobs) == (len(a.token_ids) if with_logprobs else 0) for a in answers)
                for mine, theirs in zip(answers, right, strict=True):
                    worst = max([worst, *map(distance, mine.logprobs, theirs.logprobs)])
            assert worst <= TOLERANCE
            assert decode.kv is not None
            fresh = sum(-(-len(prompt) // PAGE_SIZE) for i, (prompt, _) in enumerate(requests) if i % 3 != 2)
            assert transfers == COUNT, "every prompt was computed by prefill"
            assert sent_bytes >= fresh * decode.kv.layout.page_bytes, "as NIXL counts them"
            again = sum((sampling.n - 1) * min(2, len(prompt)) for prompt, sampling in requests)
            assert kept == again, "decode computes no prompt, but its end for each branch"

    asyncio.run(run())


async def _figures(prefill: InstanceRecord, decode: InstanceRecord) -> tuple[float, float, float]:
    """Return prefill's transfers and sent bytes, and the prompt tokens that decode computed."""
    moved = await asyncio.to_thread(_metrics, f"{prefill.http}")
    kept = await asyncio.to_thread(_metrics, f"{decode.http}")
    return (
        moved["kvmesh_kv_transfer_seconds_count"],
        moved["kvmesh_kv_transfer_bytes_total"],
        kept["kvmesh_prompt_tokens_total"],
    )


def _metrics(url: str) -> dict[str, float]:
    lines = map(str.split, metrics_of(url))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}
