"""Real processes whose wall clocks are an hour off: prefill still computes prompts, and a metric shows the skew."""

import asyncio
from functools import partial
from typing import Final

import pytest

from tests.mesh.harness import MeshProcesses, metric, open_client
from tests.mesh.mocks import MAX_TOKENS, MODEL, no_page_is_lost, one_engine, random_prompts
from tests.mesh.through_prefill import through_prefill

pytestmark = pytest.mark.mesh

HOUR_S: Final = 3600


@pytest.mark.parametrize("role", ["bootstrap", "prefill", "decode"])
@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_an_hour_of_skew_costs_no_answer_and_no_transfer(mock_mesh: MeshProcesses, role: str, skew_s: int) -> None:
    prompts = random_prompts(40)
    expected = one_engine(mock_mesh.home, prompts)
    skewed = {"SKEW_S": str(skew_s), "SKEWED_MODULE": f"services.{role}"}
    mock_mesh.modules[role] = "tests.mesh.skewed_service"

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            assert (
                await through_prefill(client, partial(client.generate_all, prompts, MAX_TOKENS, model=MODEL))
                == expected
            )
            await no_page_is_lost(client)
            [record] = client.book.of_role(role)
            assert metric(record.http, "kvmesh_clock_skew_seconds") == pytest.approx(HOUR_S, abs=10)
        assert mock_mesh.one(role).logged().count("clock skew") >= 1

    mock_mesh.start("bootstrap", "prefill", "decode", **skewed)
    asyncio.run(run())
