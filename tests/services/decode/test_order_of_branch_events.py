"""Events of a request with two branches and a constraint, in every order: each branch gets its tokens and end once."""

from collections.abc import Awaitable, Callable
from itertools import permutations
from typing import Final

import pytest

from components.kv_transfer.aux import AuxRecord
from components.messaging.outbox import StreamOutbox
from components.wire.generate import CancelStreams
from components.wire.sampling import Constraint, SamplingParams
from engine.ports import Exposed, FinishReason, TokenOutput
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.test_decode_service import FRONT, ID, PAGES, ROOM, STAMP, Decode
from tests.services.decode.test_order_of_events import EVENTS as OF_TRANSFER
from tests.waiting import turns

pytestmark = pytest.mark.anyio

TURNS: Final = (0, 1, 3)  # between two events
TWO: Final = SamplingParams(max_tokens=5, n=2, constraint=Constraint(kind="regex", text="a*"))
TOKENS: Final = {1: [42, 43], 2: [50, 51]}  # by stream


async def _compiled(decode: Decode) -> None:
    if not decode.masks.ready.done():
        decode.masks.ready.set_result("the mask")


async def _reserved(decode: Decode) -> None:
    if ID in decode.engine.engine.submitted:
        decode.engine.step(reserved=[Exposed(ID, PAGES, 4, 4)])


async def _landed(decode: Decode) -> None:
    if ROOM in decode.transfer.expected and decode.prefill.offered:
        decode.transfer.land(ROOM, decode.prefill.offered[-1].aux_slot, AuxRecord(STAMP, 3, 42, 0))


def cancelled(stream_id: int) -> Callable[[Decode], Awaitable[None]]:
    async def event(decode: Decode) -> None:
        await decode.service.cancel(CancelStreams(reply_to=FRONT, stream_ids=[stream_id]))

    return event


EVENTS: Final[dict[str, Callable[[Decode], Awaitable[None]]]] = {
    "compiled": _compiled,
    "reserved": _reserved,
    "landed": _landed,
    "announced": OF_TRANSFER["announced"],
    "failed": OF_TRANSFER["failed"],
    "first cancelled": cancelled(1),
    "second cancelled": cancelled(2),
}
CANCELS: Final = {"first cancelled": 1, "second cancelled": 2}


async def _run(order: tuple[str, ...], pause: int) -> None:
    bus = FakeBus()
    async with StreamOutbox(bus, "d", lambda: "mine", lambda: 1).running() as outbox:
        decode = Decode(outbox, bus)
        decode.engine.engine.delivered = [TokenOutput(ID, [42]), TokenOutput(ID, [50], branch=1)]
        await decode.ask(sampling=TWO)
        for name in order:
            await EVENTS[name](decode)
            await turns(pause)
        await turns()
        for event in (_compiled, _reserved, _landed):
            await event(decode)
            await turns()
        gone = {CANCELS[name] for name in order if name in CANCELS}
        did = {done[0] for done in decode.engine.engine.did}
        if "deliver" in did or "recompute" in did:
            for number in range("deliver" in did, 2):  # also of branches that were cancelled: they were under way
                reason = FinishReason.LENGTH if number else None
                step = [TokenOutput(ID, [TOKENS[b + 1][number]], reason, branch=b) for b in range(2)]
                decode.engine.step(tokens=step)
        await decode.until_nothing_runs()
        assert {item.stream_id for item in decode.items() if item.error} == gone
        assert decode.errors() == ["Cancelled"] * len(gone)
        for stream_id, tokens in TOKENS.items():
            items = [item for item in decode.items() if item.stream_id == stream_id and item.error is None]
            sent = [token for item in items for token in item.token_ids]
            if stream_id in gone:
                assert sent in ([], tokens[:1])
            else:
                assert sent == tokens
                assert [item.finish for item in items if item.finish] == ["length"]
        if gone and ID in decode.engine.engine.submitted:
            names = [done[0] for done in decode.engine.engine.did]
            since = decode.engine.engine.did[names.index("submit") :]  # before, the engine does not know the request
            assert (("cancel", ID) if len(gone) == 2 else ("cancel", ID, min(gone) - 1)) in since
        assert {"deliver", "recompute"} & did or len(gone) == 2
        assert not {"deliver", "recompute"} <= did, "its prompt is computed once"
        decode.assert_nothing_is_kept()


@pytest.mark.parametrize("first", EVENTS)
async def test_each_branch_has_its_tokens_and_its_end_once(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decode.prefill_client.randbits", lambda _: STAMP - 1)
    others = [name for name in EVENTS if name != first]
    for number, following in enumerate(permutations(others, 3)):
        order, pause = (first, *following), TURNS[(number + number // (len(others) - 2)) % len(TURNS)]
        try:
            await _run(order, pause)
        except Exception as exc:
            exc.add_note(f"{order}, {pause} turns apart")
            raise
