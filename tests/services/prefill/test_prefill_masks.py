"""The first token is drawn with a mask, and a prompt whose mask is not ready delays no other."""

import asyncio

import pytest

from components.errors import Rejected
from components.wire.sampling import Constraint, SamplingParams
from tests.services.prefill.test_prefill_service import Prefill, prefill
from tests.waiting import PATIENCE_S, turns

pytestmark = pytest.mark.anyio
__all__ = ["prefill"]
CONSTRAINED = SamplingParams(max_tokens=5, constraint=Constraint(kind="regex", text="a+"))


async def test_others_are_computed_while_a_mask_is_compiled_and_decode_is_answered_before(prefill: Prefill) -> None:
    await prefill.ask(sampling=CONSTRAINED)
    await prefill.ask("other")
    await turns()
    assert prefill.engine.engine.submitted.keys() == {"other"}
    prefill.masks.ready.set_result("the mask")
    await turns()
    assert prefill.engine.engine.submitted["r"].mask == "the mask"


async def test_a_prompt_that_is_called_off_while_its_mask_is_compiled_is_never_computed(prefill: Prefill) -> None:
    await prefill.ask(sampling=CONSTRAINED)
    await turns()
    await asyncio.wait_for(prefill.quiesce(), PATIENCE_S)
    prefill.masks.ready.set_result("the mask")
    await turns()
    assert not prefill.engine.engine.submitted
    prefill.assert_nothing_is_kept()


@pytest.mark.parametrize(
    ("fault", "told"), [(Rejected("a constraint that cannot be kept"), "Rejected"), (KeyError(), "InvariantBroken")]
)
async def test_a_prompt_whose_mask_cannot_be_made_leaves_nothing_behind_and_decode_hears(
    prefill: Prefill, fault: Exception, told: str
) -> None:
    prefill.masks.ready.set_exception(fault)
    await prefill.ask(sampling=CONSTRAINED)
    await turns()
    assert prefill.failures == [told]
    assert not prefill.engine.engine.submitted
    prefill.assert_nothing_is_kept()
