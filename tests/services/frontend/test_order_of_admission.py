"""What happens to requests before and in the queue, in every order and a few turns of the loop apart: counts return to zero."""

import asyncio
from collections.abc import Callable
from itertools import permutations, product
from typing import Final

import pytest

from components.errors import QueueFull
from components.routing.policy import REQUEST_TOKENS
from services.frontend.admission import CHECK_INTERVAL_S
from services.frontend.ports import FleetRoom
from tests.faults.virtual_loop import run_virtually
from tests.services.frontend.test_admission import EMPTY, FULL, UNKNOWN, Case, soon

MOST_TURNS: Final = 2  # between two events


def _begins(case: Case) -> None:
    ticket = case.tickets["runs"]
    if ticket.is_admitted and ticket.choices_not_started:
        case.admission.began(ticket, ticket.tokens - REQUEST_TOKENS)


def _ends(case: Case) -> None:
    case.admission.leave(case.tickets["runs"], 50)


def _leaves(case: Case) -> None:
    case.tasks["waits"].cancel()


def _better(case: Case) -> None:
    try:
        case.come("better", 900, key=b"b", priority=-1)
    except QueueFull as exc:
        case.refused["better"] = exc


def _room(room: FleetRoom) -> Callable[[Case], None]:
    def changes(case: Case) -> None:
        case.room_now = room

    return changes


EVENTS: Final[dict[str, Callable[[Case], None]]] = {
    "begins": _begins,
    "ends": _ends,
    "leaves": _leaves,
    "a better one comes": _better,
    "full": _room(FULL),
    "empty": _room(EMPTY),
    "lost": _room(UNKNOWN),
}
# seconds after the events: in the same turn of the loop, at the next check, after the queue's time limit
SECONDS: Final = (0.0, CHECK_INTERVAL_S, 1.1)


@pytest.mark.parametrize("most", [1, None], ids=["one at a time", "by tokens"])
@pytest.mark.parametrize("first", EVENTS)
def test_every_request_ends_once_and_counts_return_to_zero(first: str, most: int | None) -> None:
    async def test() -> None:
        for others in permutations([name for name in EVENTS if name != first], 2):
            for pauses, wait_s in product(product((0, 1, MOST_TURNS, CHECK_INTERVAL_S), repeat=2), SECONDS):
                await one([first, *others], pauses, wait_s)

    async def one(order: list[str], pauses: tuple[float, ...], wait_s: float) -> None:
        case = Case(EMPTY, max_inflight=most, queue_tokens=1000, queue_timeout_s=1.0)
        case.come("runs", 2000)  # more than there is room for
        case.come("waits", 300, key=b"a")
        for name, pause in zip(order, [*pauses, 0], strict=True):
            EVENTS[name](case)
            if isinstance(pause, float):
                await asyncio.sleep(pause)
            else:
                for _ in range(pause):
                    await asyncio.sleep(0)
        await asyncio.sleep(wait_s)
        await soon()
        a, at = case.admission, (order, pauses, wait_s)
        assert a._inflight == sum(ticket.is_admitted for ticket in case.tickets.values()) <= (most or 3), at
        assert a._choices_not_started == sum(
            ticket.choices_not_started for ticket in case.tickets.values() if ticket.is_admitted
        ), at
        assert a._queue.tokens == sum(ticket.tokens for ticket in case.tickets.values() if ticket in a._queue), at
        if wait_s and a._queue and not a._inflight:
            assert case.room_now != EMPTY, ("there is room, and a request waits", at)
        if order[0] == "full" and pauses[0] == CHECK_INTERVAL_S and not {"empty", "lost"} & set(order):
            assert case.admitted == ["runs"], at
        refused, admitted = case.refused, case.admitted
        assert not set(refused) & set(admitted), at
        assert all(1 <= (exc.retry_after_s or 0) <= 60 for exc in refused.values()), at
        if wait_s > 1:
            assert not a._queue, at
        for name, ticket in case.tickets.items():
            case.tasks[name].cancel()
            a.leave(ticket)
        await soon()
        assert case.is_clean(), at

    run_virtually(test)
