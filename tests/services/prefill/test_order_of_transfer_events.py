"""Events of a transfer, in every order and a few turns of the event loop apart: nothing is written after `Quiet`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import permutations
from typing import Final

import pytest

from components.errors import Overloaded, Rejected, TransferFailed
from tests.services.prefill.test_prefill_service import ROOM, Prefill
from tests.waiting import turns

pytestmark = pytest.mark.anyio

MAX_TURNS: Final = 3  # between two events


async def _asked(prefill: Prefill) -> None:
    with suppress(Rejected, Overloaded):  # after `Quiet`; from a lost decode
        await prefill.ask()


async def _offered(prefill: Prefill) -> None:
    with suppress(TransferFailed):
        await prefill.offer()


async def _computed(prefill: Prefill) -> None:
    prefill.computed()


async def _lost(prefill: Prefill) -> None:
    prefill.registry.book.drop("d")


async def _ended(prefill: Prefill) -> None:
    prefill.transfer.gate.set()


EVENTS: Final[dict[str, Callable[[Prefill], Awaitable[None]]]] = {
    "asked": _asked,
    "offered": _offered,
    "computed": _computed,
    "lost": _lost,
    "ended": _ended,
}


async def _run(order: tuple[str, ...], pause: int) -> None:
    prefill = Prefill()
    prefill.transfer.gate.clear()

    async def quiesce() -> int:
        await prefill.quiesce()
        assert prefill.transfer.in_flight == 0
        return len(prefill.transfer.writes)

    quiet = None
    for name in order:
        if name == "quiesced":
            quiet = asyncio.ensure_future(quiesce())
        else:
            await EVENTS[name](prefill)
        await turns(pause)
    await turns()
    assert quiet is not None
    assert await quiet == len(prefill.transfer.writes)
    assert await prefill.closed() == [ROOM]
    if prefill.engine.did("submit"):
        prefill.assert_nothing_is_kept()
    await prefill.service.drained()


@pytest.mark.parametrize("first", [*EVENTS, "quiesced"])
async def test_nothing_is_written_after_quiet_and_nothing_is_kept(first: str) -> None:
    others = [name for name in (*EVENTS, "quiesced") if name != first]
    for following in permutations(others):
        for pause in range(MAX_TURNS):
            order = (first, *following)
            try:
                await _run(order, pause)
            except Exception as exc:
                exc.add_note(f"{order}, {pause} turns apart")
                raise
