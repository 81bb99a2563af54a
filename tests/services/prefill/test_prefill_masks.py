"""The first token is drawn by a mask, and a prompt whose mask is not ready holds up no other."""

import asyncio
from typing import Any

import pytest

from components.errors import Rejected
from components.wire.sampling import Constraint, Sampling
from tests.services.decode.fake_engine import turns
from tests.services.prefill.test_prefill_service import Prefill, prefill

pytestmark = pytest.mark.anyio
__all__ = ["prefill"]
CONSTRAINED = Sampling(max_tokens=5, constraint=Constraint(kind="regex", text="a+"))


class Masks:
    """What `MaskMaker` does, when the test lets it."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def mask_of(self, sampling: Sampling, token_ids: Any) -> Any:
        return await asyncio.shield(self.ready)


async def test_others_are_computed_while_a_mask_is_compiled(prefill: Prefill) -> None:
    masks: Any = Masks()
    prefill.service._masks = masks
    waiting = asyncio.create_task(prefill.ask(sampling=CONSTRAINED))
    await turns()
    await prefill.ask("other")
    assert prefill.engine.engine.submitted.keys() == {"other"}
    masks.ready.set_result("the mask")
    await waiting
    await turns()
    assert prefill.engine.engine.submitted["r"].mask == "the mask"


@pytest.mark.parametrize("masks", [None, "refuse"])
async def test_a_prompt_without_its_mask_leaves_nothing_behind(prefill: Prefill, masks: str | None) -> None:
    if masks is not None:
        made: Any = Masks()
        prefill.service._masks = made
        made.ready.set_exception(Rejected("a constraint that cannot be kept"))
    with pytest.raises(Rejected):
        await prefill.ask(sampling=CONSTRAINED)
    await turns()
    assert not prefill.engine.engine.submitted
    assert not prefill.service.num_jobs
