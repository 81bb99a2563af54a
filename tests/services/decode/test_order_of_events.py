"""Events of a transfer, in every order and a few turns of the event loop apart: no token is lost or sent twice."""

from collections.abc import Awaitable, Callable
from itertools import permutations, product
from typing import Final

import pytest

from components.kv_transfer.aux import AuxRecord
from components.messaging.outbox import StreamOutbox
from components.wire.generate import CancelStreams
from components.wire.prefill import KvComing, RoomFailed
from engine.ports import FinishReason, TokenOutput
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.services.decode.test_decode_service import FRONT, ID, ROOM, STAMP, Decode
from tests.waiting import turns

pytestmark = pytest.mark.anyio

MAX_TURNS: Final = 3  # between two events; a failed transfer is settled two turns later


async def _announced(decode: Decode) -> None:
    await decode.service.kv_coming(KvComing(room=ROOM, request_id=ID, first_token=42))


async def _failed(decode: Decode) -> None:
    await decode.service.room_failed(RoomFailed(request_id=ID, room=ROOM, error="TransferFailed", cause="a bad cable"))


async def _lost(decode: Decode) -> None:
    decode.prefill_client.instance_lost(record("p", "1", role="prefill", model="m"), "its lease has expired")


async def _cancelled(decode: Decode) -> None:
    await decode.service.cancel(CancelStreams(reply_to=FRONT, stream_ids=[1]))


async def _landed(decode: Decode) -> None:
    if ROOM in decode.transfer.expected:  # else no call waits for the write
        decode.transfer.land(ROOM, decode.prefill.offered[-1].aux_slot, AuxRecord(STAMP, 3, 42, 0))


EVENTS: Final[dict[str, Callable[[Decode], Awaitable[None]]]] = {
    "announced": _announced,
    "landed": _landed,
    "failed": _failed,
    "lost": _lost,
    "cancelled": _cancelled,
}


def _drawn(decode: Decode) -> list[int]:
    """Return the tokens that a real engine would still draw."""
    for done in decode.engine.engine.did:
        match done:
            case "recompute", _:
                return [42, 43]
            case ("recompute", _, 42) | ("deliver", _, 42):
                return [43]
    return []


@pytest.mark.parametrize("first", EVENTS)
async def test_each_token_is_sent_once(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decode.prefill_client.randbits", lambda _: STAMP - 1)
    for others in permutations([name for name in EVENTS if name != first], 2):
        for pauses in product(range(MAX_TURNS + 1), repeat=2):
            order = [first, *others]
            bus = FakeBus()
            async with StreamOutbox(bus, "d", lambda: "mine", lambda: 1).running() as outbox:
                decode = Decode(outbox, bus)
                await decode.ask()
                await decode.reserve()
                for name, pause in zip(order, [*pauses, 0], strict=True):
                    await EVENTS[name](decode)
                    await turns(pause)
                await turns()
                is_cancelled = "cancelled" in order
                if not is_cancelled and not _drawn(decode):
                    await _landed(decode)
                    await turns()
                *before, last = _drawn(decode) or [None]
                if last is not None:
                    step = [TokenOutput(ID, [token]) for token in before]
                    decode.engine.step(tokens=[*step, TokenOutput(ID, [last], FinishReason.LENGTH)])
                await decode.until_nothing_runs()
                sent = decode.tokens()
                assert sent == [42, 43] or (is_cancelled and sent in ([], [42])), (order, pauses, sent)
                decode.assert_nothing_is_kept()
