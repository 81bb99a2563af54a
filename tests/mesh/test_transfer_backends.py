"""The whole mesh with other KV transfer backends than NIXL, and mock engines, whose tokens depend on the received KV."""

import asyncio
from functools import partial
from typing import Any

import pytest

from components.errors import InvariantBroken
from components.kv_transfer.backends import kv_opener
from components.startup import WrongSettings
from components.wire.sampling import SamplingParams
from tests.mesh.harness import MeshProcesses, open_client
from tests.mesh.mocks import MAX_TOKENS, MODEL, no_page_is_lost, one_engine, random_prompts
from tests.mesh.through_prefill import through_prefill
from tests.mesh.trace_checks import traces_since

pytestmark = pytest.mark.mesh


def _answers(
    mesh: MeshProcesses, prompts: list[list[int]], max_tokens: int = MAX_TOKENS, *, disaggregated: bool = True
) -> list[list[int]]:
    """`disaggregated`: prefill computes all prompts."""

    async def run() -> list[list[int]]:
        async with open_client(mesh, MODEL) as client:
            await client.until_usable("prefill")
            ask = partial(client.generate_all, prompts, max_tokens, model=MODEL)
            answers = await (through_prefill(client, ask) if disaggregated else ask())
            await no_page_is_lost(client)
        return answers

    return asyncio.run(run())


def _spans(mesh: MeshProcesses, name: str, count: int) -> list[dict[str, Any]]:
    """Return all such spans of the mesh, once `count` traces have one."""
    traces = traces_since(mesh.home, 0, count, {name})
    return [dict(span.attributes) for spans in traces for span in spans if span.name == name]


@pytest.mark.parametrize("page_size", [16, 64])  # of prefill; decode's is 16
def test_mooncake_moves_the_same_kv_as_nixl(mock_mesh: MeshProcesses, page_size: int) -> None:
    try:
        kv_opener("mooncake")
    except WrongSettings as exc:
        pytest.skip(exc.message)
    prompts = random_prompts(100)
    expected = one_engine(mock_mesh.home, prompts)
    sizes = {"MESH_PREFILL_ENGINE__PAGE_SIZE": str(page_size)}
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_KV_TRANSFER="mooncake", **sizes)
    assert _answers(mock_mesh, prompts) == expected
    assert {s["kvmesh.transfer.backend"] for s in _spans(mock_mesh, "prefill.transfer", 100)} == {"mooncake"}


def test_fake_runs_the_whole_protocol_moves_nothing_and_reports_it(mock_mesh: MeshProcesses) -> None:
    prompts = random_prompts(20)
    expected = one_engine(mock_mesh.home, prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_KV_TRANSFER="fake")
    assert _answers(mock_mesh, prompts, 1) == expected, "the first token is prefill's"
    for role, span in (("prefill", "prefill.transfer"), ("decode", "decode.receive")):
        assert "KV transfer is fake" in mock_mesh.one(role).logged()
        assert {s["kvmesh.transfer.backend"] for s in _spans(mock_mesh, span, 20)} == {"fake"}
    assert {s["kvmesh.transfer.bytes"] for s in _spans(mock_mesh, "prefill.transfer", 20)} == {0}
    with pytest.raises(InvariantBroken, match=r"should contain .* tokens, but its marks are"):
        # The first token comes from prefill. The next one needs the pages, which the mock engine checks.
        _answers(mock_mesh, [list(range(100))], 8)


def test_two_backends_do_not_try_each_other_and_decode_computes_the_prompts(mock_mesh: MeshProcesses) -> None:
    prompts = random_prompts(10)
    expected = one_engine(mock_mesh.home, prompts)
    mock_mesh.start("bootstrap", "prefill", "decode", MESH_PREFILL_KV_TRANSFER="fake")
    assert _answers(mock_mesh, prompts, disaggregated=False) == expected
    logged = mock_mesh.one("decode").logged()
    assert logged.count("--kv-transfer: nixl/UCX here, fake there") == 1
    assert "computing the prompt here" not in logged
    assert len(_spans(mock_mesh, "decode.request", 10)) == 10
    assert not _spans(mock_mesh, "prefill.transfer", 0)
    assert not _spans(mock_mesh, "prefill.request", 0)
