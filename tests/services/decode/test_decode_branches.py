"""A request with n branches is n streams, each with its own numbers, its own end and its own cancellation."""

import pytest

from components.errors import Rejected
from components.kv_transfer.aux import AuxRecord
from components.wire.generate import StreamItem
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.ports import Failed, FinishReason, Phase, TokenOutput
from tests.services.decode.test_decode_service import ID, ROOM, STAMP, Decode, decode  # noqa: F401
from tests.waiting import turns

pytestmark = pytest.mark.anyio

THREE = SamplingParams(max_tokens=5, n=3)
TOLD = TokenLogprobs(-0.5, ((42, -0.5), (7, -1.25)))


def stream(decode: Decode, stream_id: int) -> list[StreamItem]:  # noqa: F811
    return [item for item in decode.items() if item.stream_id == stream_id]


async def begin(decode: Decode) -> None:  # noqa: F811
    """Three branches, in streams 1, 2 and 3, with a token each."""
    await decode.ask(sampling=THREE)
    await decode.reserve()
    await decode.land()
    decode.engine.step(tokens=[TokenOutput(ID, [50], branch=1), TokenOutput(ID, [60], branch=2)])
    await turns()


async def test_each_branch_has_a_stream_that_ends_for_itself(decode: Decode) -> None:  # noqa: F811
    await begin(decode)
    assert decode.engine.engine.submitted[ID].sampling.n == 3
    assert (decode.service.heartbeat().accepted, decode.service.heartbeat().num_requests) == (1, 3)
    decode.engine.step(tokens=[TokenOutput(ID, [43], FinishReason.STOP), TokenOutput(ID, [51], branch=1)])
    decode.engine.step(tokens=[TokenOutput(ID, [52], FinishReason.LENGTH, branch=1)])
    await turns()
    assert decode.queues() == {"running": 1}
    assert (decode.service.heartbeat().accepted, decode.service.heartbeat().num_requests) == (1, 1)
    decode.engine.step(tokens=[TokenOutput(ID, [61], FinishReason.STOP, branch=2)])
    await turns()
    for stream_id, tokens, finish in ((1, [42, 43], "stop"), (2, [50, 51, 52], "length"), (3, [60, 61], "stop")):
        items = stream(decode, stream_id)
        assert [t for item in items for t in item.token_ids] == tokens
        assert [item.seq for item in items] == list(range(len(items)))
        assert items[-1].finish == finish
    assert [bool(item.sent_unix_ns) for item in decode.items()].count(True) == 1, "the request's first token"
    assert decode.engine.did("cancel") == []
    decode.assert_nothing_is_kept()


async def test_a_branch_that_nobody_reads_is_cancelled_alone(decode: Decode) -> None:  # noqa: F811
    await begin(decode)
    assert await decode.cancel(2) == 1
    assert await decode.cancel(2) == 0
    assert [entry for entry in decode.engine.engine.did if entry[0] == "cancel"] == [("cancel", ID, 1)]
    late = [TokenOutput(ID, [43]), TokenOutput(ID, [51], branch=1), TokenOutput(ID, [61], branch=2)]
    decode.engine.step(tokens=late)
    await turns()
    assert [t for item in stream(decode, 2) for t in item.token_ids] == [50]
    assert stream(decode, 1)[-1].token_ids == [43]
    await decode.cancel(1)
    await decode.cancel(3)
    assert [entry for entry in decode.engine.engine.did if entry[0] == "cancel"][1:] == [
        ("cancel", ID, 0),
        ("cancel", ID),
    ]
    decode.assert_nothing_is_kept()


async def test_a_cancelled_branch_sends_a_last_item_after_its_tokens(decode: Decode) -> None:  # noqa: F811
    """It sent none, and a frontend keeps a closed stream until its last item."""
    await begin(decode)
    decode.engine.step(tokens=[TokenOutput(ID, [51], branch=1)])
    await decode.cancel(2)
    await turns()
    items = stream(decode, 2)
    assert [(item.seq, item.token_ids, item.error and item.error.error) for item in items] == [
        (0, [50], None),
        (1, [51], None),
        (2, [], "Cancelled"),
    ]
    await decode.cancel(1)
    await decode.cancel(3)
    assert [item.stream_id for item in decode.items() if item.error] == [2, 1, 3]
    decode.assert_nothing_is_kept()


async def test_the_last_branch_to_end_ends_the_request_whoever_was_cancelled(decode: Decode) -> None:  # noqa: F811
    await begin(decode)
    await decode.cancel(1)
    await decode.cancel(3)
    decode.engine.step(tokens=[TokenOutput(ID, [51], FinishReason.STOP, branch=1)])
    await turns()
    assert [item.stream_id for item in decode.items() if item.error] == [1, 3]
    decode.assert_nothing_is_kept()


async def test_a_failure_is_told_to_every_branch_that_is_not_over(decode: Decode) -> None:  # noqa: F811
    await begin(decode)
    decode.engine.step(tokens=[TokenOutput(ID, [43], FinishReason.STOP)])
    decode.engine.step(failed=[Failed(ID, Rejected("broken"))])
    await turns()
    assert [(item.stream_id, item.error.error) for item in decode.items() if item.error] == [
        (2, "Rejected"),
        (3, "Rejected"),
    ]
    decode.assert_nothing_is_kept()


@pytest.mark.parametrize("n", [0, -1, 129, 2**31])
async def test_no_streams_are_made_for_a_number_out_of_range(decode: Decode, n: int) -> None:  # noqa: F811
    with pytest.raises(Rejected, match="between 1 and 128"):
        await decode.ask(sampling=SamplingParams(max_tokens=5, n=n))
    decode.assert_nothing_is_kept()


async def test_the_first_tokens_logprobs_come_beside_the_kv(decode: Decode) -> None:  # noqa: F811
    await decode.ask(sampling=SamplingParams(max_tokens=5, logprobs=2))
    assert decode.prefill.asked[0].sampling.logprobs == 2
    await decode.reserve()
    decode.transfer.land(ROOM, decode.prefill.offered[-1].aux_slot, AuxRecord(STAMP, 3, 42, 0, logprobs=TOLD))
    await turns()
    assert decode.items()[0].logprobs == [TOLD]
    decode.engine.step(tokens=[TokenOutput(ID, [43], FinishReason.LENGTH, logprobs=[TOLD])])
    await turns()
    assert decode.items()[1].logprobs == [TOLD]


async def test_a_prompt_whose_logprobs_are_asked_for_is_computed_here(decode: Decode) -> None:  # noqa: F811
    await decode.ask(sampling=SamplingParams(max_tokens=5, prompt_logprobs=1))
    assert decode.engine.engine.submitted[ID].phase is Phase.FULL
    assert not decode.prefill.asked
    decode.engine.step(tokens=[TokenOutput(ID, [42], FinishReason.LENGTH, prompt_logprobs=[TOLD] * 9)])
    await turns()
    assert decode.items()[0].prompt_logprobs == [TOLD] * 9
