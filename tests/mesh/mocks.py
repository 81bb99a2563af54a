"""For tests over mock engines: settings, prompts, and the right tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from components.wire.sampling import SamplingParams
from engine.config import EngineConfig, MockConfig
from engine.mock.mock_engine import build_engine
from engine.ports import Engine, EngineRequest
from tests.mesh.harness import Answer, Client

MODEL: Final = "mock"
MAX_TOKENS: Final = 24
GREEDY: Final = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
SHAPE: Final = {"LAYERS": "4", "KV_HEADS": "2", "HEAD_DIM": "16"}  # 8 KiB a page
NO_COST: Final = {f"MESH_ENGINE__MOCK__{name}": "0" for name in ("DECODE_S", "CONTEXT_TOKEN_S", "PROMPT_TOKEN_S")}
MOCK_ENV: Final = {
    "MESH_ENGINE__NUM_PAGES": "2048",
    "MESH_ENGINE__MAX_STEP_TOKENS": "128",
    "MESH_ENGINE__MOCK__SPEEDUP": "inf",
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    "MESH_LEASE_TTL_S": "3",
    **{f"MESH_ENGINE__MOCK__{name}": value for name, value in SHAPE.items()},
}


def random_prompts(count: int) -> list[list[int]]:
    """Of all lengths; every third begins like the one before it."""
    draw = random.Random(3)
    prompts: list[list[int]] = []
    for i in range(count):
        shared = prompts[-1][: draw.randrange(len(prompts[-1]))] if i % 3 == 2 else []
        prompts.append(shared + [draw.randrange(256) for _ in range(draw.randrange(1, 400))])
    return prompts


def mock_engine(home: Path) -> Engine:
    """Build an engine in this process whose steps take no time."""
    shape = {name.lower(): int(value) for name, value in SHAPE.items()}
    return build_engine(MODEL, EngineConfig(num_pages=4096, mock=MockConfig(speedup=float("inf"), **shape)), home)


def one_engine(home: Path, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the tokens of one engine in this process."""
    engine = mock_engine(home)
    return [answer.token_ids for [answer] in aggregated(engine, [(prompt, sampling) for prompt in prompts])]


def branches_of_one_engine(home: Path, prompts: list[list[int]], sampling: SamplingParams) -> list[list[Answer]]:
    """Return each branch, with its log-probabilities."""
    return aggregated(mock_engine(home), [(prompt, sampling) for prompt in prompts])


def aggregated(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[Answer]]:
    """Return each branch of each request on `engine`, which must be idle."""
    answers = [[Answer() for _ in range(sampling.n)] for _, sampling in requests]
    for i, (prompt, sampling) in enumerate(requests):
        engine.submit(EngineRequest(str(i), prompt, sampling))
    while engine.has_work():
        for tokens in engine.step().tokens:
            answer = answers[int(tokens.request_id)][tokens.branch]
            answer.token_ids += tokens.token_ids
            answer.logprobs += tokens.logprobs or ()
            answer.finish = None if tokens.finish is None else str(tokens.finish)
    return answers


async def no_page_is_lost(client: Client) -> None:
    """Wait until no worker holds a page; then every page must be free or cached."""
    for beat in await client.until_quiet():
        assert beat.free_pages + beat.cached_pages == beat.total_pages
        assert (beat.held_pages, beat.num_held, beat.num_reserved) == (0, 0, 0)
