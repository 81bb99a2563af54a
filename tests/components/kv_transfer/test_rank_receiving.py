"""A follower makes NIXL progress exactly while its leader expects an aux slot, in every order of orders."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import product
from typing import Final

import pytest

from components.kv_transfer.aux import SLOTS
from components.kv_transfer.nixl_transfer import NixlTransfer
from components.kv_transfer.rank_connection import Hasten, Open, Order, Receive
from components.kv_transfer.rank_end import RankEnd
from tests.components.kv_transfer.nixl_peer import LAYOUT, on_tested_device

pytestmark = pytest.mark.anyio

ORDERS: Final[tuple[Order, ...]] = (Receive(on=True), Receive(on=False), Hasten())
MAX_ORDERS: Final = 5
MAX_TURNS: Final = 2  # between two orders


@pytest.fixture
async def end() -> AsyncIterator[RankEnd]:
    region = on_tested_device()
    async with AsyncExitStack() as stack:
        opened = RankEnd(stack)
        order = Open("nixl", "rank", "127.0.0.1", 0, region.address, region.num_pages, region.device, LAYOUT)
        await opened.execute(0, order)
        yield opened


def transfer_of(end: RankEnd) -> NixlTransfer:
    transfer = end._transfer
    assert isinstance(transfer, NixlTransfer)
    return transfer


def is_receiving(end: RankEnd) -> bool:
    """Whether NIXL's thread makes progress, without the lingering after an order."""
    return bool(transfer_of(end)._arrivals._expected)


async def obey_all(end: RankEnd, orders: tuple[Order, ...], turns: int) -> None:
    """Run each order in a task, like `execute_orders`."""
    async with asyncio.TaskGroup() as tasks:
        for order in orders:
            tasks.create_task(end.execute(1, order))
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_follower_receives_after_the_last_order_says_so(end: RankEnd) -> None:
    """If a transfer began as the last one landed, the follower read both orders, and received nothing."""
    for count in range(1, MAX_ORDERS + 1):
        for orders in product(ORDERS, repeat=count):
            for turns in range(MAX_TURNS + 1):
                receiving = [order.on for order in orders if isinstance(order, Receive)]
                await obey_all(end, orders, turns)
                await asyncio.sleep(0)
                if receiving:
                    assert is_receiving(end) == receiving[-1], (orders, turns)
                await obey_all(end, (Receive(on=False),), 1)
                assert not is_receiving(end)


async def test_a_follower_holds_one_aux_slot_however_often_it_receives(end: RankEnd) -> None:
    """Each order took another slot: after 1,024 orders the follower received nothing."""
    for _ in range(SLOTS + 1):
        await obey_all(end, (Receive(on=True), Receive(on=False)), 1)
    await end.execute(1, Receive(on=True))
    assert is_receiving(end)
    assert transfer_of(end).aux.num_free >= SLOTS - 1
