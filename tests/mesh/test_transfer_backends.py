"""The whole mesh with other KV transfer backends than NIXL; engines as in test_mock_mesh, whose tokens tell whether KV came."""

import asyncio
import time
from typing import Any, Final

import pytest

from components.errors import InvariantBroken
from components.kv_transfer.backends import kv_opener
from components.startup import WrongSettings
from components.telemetry.trace_store import TraceStore
from components.wire.sampling import SamplingParams
from tests.mesh.harness import MeshProcesses, open_client
from tests.mesh.mocks import MAX_TOKENS, MODEL, no_page_is_lost, one_engine, random_prompts

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

RECOMPUTED: Final = "computing the prompt here"


def _answers(mesh: MeshProcesses, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with open_client(mesh, MODEL) as client:
            await client.until_usable("prefill")
            answers = list(await asyncio.gather(*(client.generate(p, max_tokens, model=MODEL) for p in prompts)))
            await no_page_is_lost(client)
        return answers

    return asyncio.run(run())


def _spans(mesh: MeshProcesses, name: str, count: int) -> list[dict[str, Any]]:
    """Of the last `count` traces: when each has one, or after a second, in which the last spans reach the disk."""
    store, deadline = TraceStore(mesh.home), time.monotonic() + 1
    while True:
        spans = [span for trace in store.last_trace_ids(count) for span in store.trace(trace) if span.name == name]
        if len(spans) >= count or time.monotonic() > deadline:
            return [dict(span.attributes) for span in spans]
        time.sleep(0.05)


@pytest.mark.parametrize("page_size", [16, 64])  # of prefill; decode's is 16
def test_mooncake_moves_the_same_kv_as_nixl(mock_mesh: MeshProcesses, page_size: int) -> None:
    try:
        kv_opener("mooncake")
    except WrongSettings as exc:
        pytest.skip(exc.message)
    prompts = random_prompts(100)
    expected = one_engine(
        mock_mesh.home, prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    )
    sizes = {"MESH_PREFILL_ENGINE__PAGE_SIZE": str(page_size)}
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_KV_TRANSFER="mooncake", **sizes)
    assert _answers(mock_mesh, prompts) == expected
    assert RECOMPUTED not in mock_mesh.one("decode").logged()
    assert {s["kvmesh.transfer.backend"] for s in _spans(mock_mesh, "prefill.transfer", 100)} == {"mooncake"}


def test_fake_runs_the_whole_protocol_moves_nothing_and_says_so(mock_mesh: MeshProcesses) -> None:
    prompts = random_prompts(20)
    expected = one_engine(mock_mesh.home, prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_KV_TRANSFER="fake")
    assert _answers(mock_mesh, prompts, 1) == expected, "the first token is prefill's"
    assert RECOMPUTED not in mock_mesh.one("decode").logged()
    for role, span in (("prefill", "prefill.transfer"), ("decode", "decode.receive")):
        assert "KV transfer is fake" in mock_mesh.one(role).logged()
        told = _spans(mock_mesh, span, 20)
        assert len(told) == 20
        assert {s["kvmesh.transfer.backend"] for s in told} == {"fake"}
    assert {s["kvmesh.transfer.bytes"] for s in _spans(mock_mesh, "prefill.transfer", 20)} == {0}
    with pytest.raises(InvariantBroken, match=r"should hold .* tokens, but its marks are"):
        # Each attempt's first token is prefill's. The next one needs the pages, and the mock engine checks them.
        _answers(mock_mesh, [list(range(100))], 8)


def test_two_backends_do_not_try_each_other_and_decode_computes_the_prompts(mock_mesh: MeshProcesses) -> None:
    prompts = random_prompts(10)
    expected = one_engine(
        mock_mesh.home, prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    )
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_PREFILL_KV_TRANSFER="fake")
    assert _answers(mock_mesh, prompts) == expected
    logged = mock_mesh.one("decode").logged()
    assert logged.count("--kv-transfer: nixl/UCX here, fake there") == 1
    assert RECOMPUTED not in logged
    assert not _spans(mock_mesh, "prefill.transfer", 10)
