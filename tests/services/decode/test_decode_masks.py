"""A request with a constraint holds no pages and asks no prefill before it has its mask."""

import pytest
from msgspec.structs import replace

from components.errors import Rejected
from components.wire.sampling import Constraint, SamplingParams
from engine.ports import Phase
from tests.services.decode.test_decode_service import ID, Decode, decode
from tests.services.fake_masks import FakeMasks
from tests.waiting import turns

pytestmark = pytest.mark.anyio
__all__ = ["decode"]
CONSTRAINED = SamplingParams(max_tokens=5, constraint=Constraint(kind="regex", text="a+"))


@pytest.fixture
def masks(decode: Decode) -> FakeMasks:
    made: FakeMasks = decode.masks
    return made


async def test_others_are_served_while_a_mask_is_compiled(decode: Decode, masks: FakeMasks) -> None:
    await decode.ask(sampling=CONSTRAINED)
    await decode.ask(stream_id=9)
    assert decode.engine.engine.submitted.keys() == {"r.9"}
    assert [asked.request_id for asked in decode.prefill.asked] == ["r.9"]
    masks.ready.set_result("the mask")
    await turns()
    request = decode.engine.engine.submitted[ID]
    assert (request.mask, request.phase) == ("the mask", Phase.DECODE)
    assert masks.asked == [list(range(10))]
    assert decode.prefill.asked[-1].sampling == CONSTRAINED
    await decode.cancel(1)
    await decode.cancel(9)


async def test_who_leaves_meanwhile_is_never_submitted(decode: Decode, masks: FakeMasks) -> None:
    await decode.ask(sampling=CONSTRAINED)
    assert await decode.cancel() == 1
    masks.ready.set_result("the mask")
    await turns()
    assert not decode.engine.engine.submitted
    assert not decode.prefill.asked
    decode.assert_nothing_is_kept()


async def test_branches_that_leave_meanwhile_are_never_begun(decode: Decode, masks: FakeMasks) -> None:
    """They were cancelled before they were submitted, and the engine generated them although no client waited."""
    await decode.ask(sampling=replace(CONSTRAINED, n=3))
    assert [await decode.cancel(stream_id) for stream_id in (1, 3)] == [1, 1]
    masks.ready.set_result("the mask")
    await turns()
    did = [entry for entry in decode.engine.engine.did if entry[0] in ("submit", "cancel")]
    assert did[-3:] == [("submit", ID, Phase.DECODE), ("cancel", ID, 0), ("cancel", ID, 2)]
    await decode.cancel(2)
    decode.assert_nothing_is_kept()


async def test_a_constraint_that_cannot_be_kept_is_the_client_s_fault(decode: Decode, masks: FakeMasks) -> None:
    masks.ready.set_exception(Rejected("a constraint that cannot be kept"))
    await decode.ask(sampling=CONSTRAINED)
    assert decode.errors() == ["Rejected"]
    decode.assert_nothing_is_kept()
