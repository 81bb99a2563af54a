"""The first token is drawn by a mask, and a prompt whose mask is not ready holds up no other."""

import asyncio
from typing import Any

import pytest

from components.errors import NoBootstrapInstance, Rejected
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


@pytest.fixture
async def masks(prefill: Prefill) -> Any:
    made: Any = Masks()
    prefill.service._masks = made
    return made


async def test_decode_has_its_answer_and_others_are_computed_while_a_mask_is_compiled(
    prefill: Prefill, masks: Masks
) -> None:
    """Compiling took its time from decode's call, which then was over before the prompt was begun."""
    accepted = await prefill.ask(sampling=CONSTRAINED)
    assert accepted.room == "boot/1"
    await prefill.offer()
    await prefill.ask("other")
    assert prefill.engine.engine.submitted.keys() == {"other"}
    masks.ready.set_result("the mask")
    await turns()
    assert prefill.engine.engine.submitted["r"].mask == "the mask"
    prefill.computed()
    await turns()
    assert prefill.ends == [None]


async def test_a_mask_that_is_there_already_lets_computing_begin_while_the_room_is_opened(
    prefill: Prefill, masks: Masks
) -> None:
    masks.ready.set_result("the mask")
    prefill.bootstrap.gate.clear()
    asking = asyncio.create_task(prefill.ask(sampling=CONSTRAINED))
    await turns()
    assert prefill.engine.did("submit") == ["r"]
    prefill.bootstrap.gate.set()
    await asking


@pytest.mark.parametrize("opened", [True, False])
async def test_what_is_called_off_while_its_mask_is_compiled_is_never_computed(
    prefill: Prefill, masks: Masks, *, opened: bool
) -> None:
    if not opened:
        prefill.bootstrap.gate.clear()
    asking = asyncio.create_task(prefill.ask(sampling=CONSTRAINED))
    await turns()
    assert asking.done() is opened
    await asyncio.wait_for(prefill.quiesce(), 5)
    masks.ready.set_result("the mask")
    await turns()
    prefill.bootstrap.gate.set()
    await asking
    await turns()
    assert prefill.ends == ["Cancelled"]
    assert not prefill.engine.engine.submitted
    prefill.assert_nothing_is_kept()


async def test_without_a_room_nothing_is_computed_when_the_mask_is_there(prefill: Prefill, masks: Masks) -> None:
    prefill.registry.book.remove("boot")
    with pytest.raises(NoBootstrapInstance):
        await prefill.ask(sampling=CONSTRAINED)
    masks.ready.set_result("the mask")
    await turns()
    assert not prefill.engine.engine.submitted
    prefill.assert_nothing_is_kept()


@pytest.mark.parametrize(
    ("fault", "told"), [(None, "Rejected"), (Rejected("cannot be kept"), "Rejected"), (KeyError(), "TransferFailed")]
)
async def test_a_prompt_without_its_mask_ends_its_room_and_leaves_nothing_behind(
    prefill: Prefill, masks: Masks, fault: Exception | None, told: str
) -> None:
    if fault is None:
        prefill.service._masks = None
    else:
        masks.ready.set_exception(fault)
    await prefill.ask(sampling=CONSTRAINED)
    await turns()
    assert prefill.ends == [told]
    assert not prefill.engine.engine.submitted
    prefill.assert_nothing_is_kept()
