"""The real model through the whole mesh: the ids are those of transformers, and all KV is transferred."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from components.telemetry.stored_spans import Span
from tests.mesh.harness import MeshProcesses, metric, open_client
from tests.mesh.through_prefill import through_prefill
from tests.mesh.trace_checks import traces_since
from tests.mesh.transformers_ids import MODEL, generate, make_prompts, written

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(600)]

PAGE_SIZE: Final = 16


@pytest.fixture(scope="module")
def prompts(real_model_dir: Path) -> list[list[int]]:
    return make_prompts(real_model_dir)


def test_the_ids_in_the_file_are_those_that_transformers_generates(
    real_model_dir: Path, prompts: list[list[int]]
) -> None:
    """For a chat, and a prompt that ends inside a page."""
    some = [3, 24]
    assert generate(real_model_dir, [prompts[i] for i in some], [8, 8]) == [written()[i][:8] for i in some]


def test_prompts_give_transformers_own_ids_one_at_a_time(real_mesh: MeshProcesses, prompts: list[list[int]]) -> None:
    some = [1, 6, 11, 17, 24, 30]
    expected = [written()[i] for i in some]

    async def run() -> list[list[int]]:
        async with open_client(real_mesh, MODEL) as client:
            await client.until_usable("prefill")
            counts = map(len, expected)
            return [
                await client.generate(prompts[i], count, model=MODEL, salt="alone")
                for i, count in zip(some, counts, strict=True)
            ]

    assert asyncio.run(run()) == expected


@dataclass(frozen=True, slots=True)
class Served:
    answers: list[list[int]]
    prompt_tokens: float  # that decode computed
    page_bytes: int
    traces: list[dict[str, Span]]  # by the name of the span


@pytest.fixture(scope="module")
def together(real_mesh: MeshProcesses, prompts: list[list[int]]) -> Served:
    """All prompts, eight in flight. Each has a salt: a prefix hit would save pages."""

    async def run() -> tuple[list[list[int]], float, int, int]:
        async with open_client(real_mesh, MODEL) as client:
            await client.until_usable("prefill")
            [decode] = client.decodes.usable()
            assert decode.kv is not None
            assert decode.http is not None
            http = decode.http

            async def ask(salt: str) -> tuple[list[list[int]], float, int]:
                """Return the answers, the prompt tokens that decode computed, and the start."""
                began_ns = time.time_ns()
                before = metric(http, "kvmesh_prompt_tokens_total")
                places = asyncio.Semaphore(8)

                async def one(i: int, count: int) -> list[int]:
                    async with places:
                        return await client.generate(prompts[i], count, model=MODEL, salt=f"{salt} {i}")

                answers = list(await asyncio.gather(*(one(i, len(ids)) for i, ids in enumerate(written()))))
                return answers, metric(http, "kvmesh_prompt_tokens_total") - before, began_ns

            return *await through_prefill(client, ask), decode.kv.layout.page_bytes

    answers, computed, began_ns, page_bytes = asyncio.run(run())
    traces = traces_since(real_mesh.home, began_ns, len(prompts), {"decode.request", "prefill.transfer"})
    return Served(answers, computed, page_bytes, [{span.name: span for span in trace} for trace in traces])


def test_32_prompts_give_transformers_own_ids_with_8_in_flight(together: Served) -> None:
    assert together.answers == written()


def test_kv_moves_as_pages_over_nixl_and_decode_computes_no_prompt_token(
    together: Served, prompts: list[list[int]]
) -> None:
    """Prefill reports pages times page bytes for each request; test_nixl_transfer.py compares this with NIXL's count."""
    assert together.prompt_tokens == 0
    moved = []
    for spans in together.traces:
        length = spans["decode.request"].attributes["kvmesh.prompt_tokens"]
        sent = spans["prefill.transfer"].attributes["kvmesh.transfer.bytes"]
        assert sent == -(-length // PAGE_SIZE) * together.page_bytes
        moved.append(length)
    assert sorted(moved) == sorted(len(p) for p in prompts)
