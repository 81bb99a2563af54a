"""Subscriptions and sending rates in large fleets: the deliveries stay within the budget."""

import asyncio

import pytest

from components.aio import background
from components.discovery.book import InstanceBook
from components.messaging.fan_out import (
    ALL_PAIRS,
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    QUERIES_PER_S,
    FleetSizes,
    SubscriptionChoice,
)
from components.messaging.kv_publisher import KvEventPublisher
from components.wire.instances import InstanceRecord, Role
from components.wire.kv_events import unpack_batch
from tests.components.discovery.records import record
from tests.faults.virtual_loop import run_virtually

BUDGET_PER_S = 50_000  # heartbeats, KV events, queries and answers together


def instances(role: Role, count: int, first: int = 0, model: str | None = "m") -> list[InstanceRecord]:
    return [record(f"{role}-{number:05}", role=role, model=model) for number in range(first, first + count)]


def book_of(*records: InstanceRecord) -> InstanceBook:
    book = InstanceBook()
    for one in records:
        book.put(one.instance_id, one)
    return book


def fleet(prefill: int, decode: int, frontends: int) -> InstanceBook:
    parts = (("prefill", prefill), ("decode", decode), ("frontend", frontends))
    return book_of(*(one for role, count in parts for one in instances(role, count)))


def deliveries_per_s(sizes: FleetSizes) -> float:
    """Return the deliveries of heartbeats, KV events, queries and answers, with all workers busy and one planner."""
    roles: tuple[Role, ...] = ("decode", "prefill")
    asked = 0 if sizes.pairs <= ALL_PAIRS else 2 * sizes.queries_per_s() * sizes.count("decode")
    return asked + sum(
        (sizes.followings(role) + sizes.count(role)) / sizes.heartbeat_rest_s(role)
        + sizes.followings(role) / sizes.kv_events_rest_s(role)
        for role in roles
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "frontends"),
    [
        (1, 1, 1),
        (4, 4, 2),
        (30, 30, 2),
        (64, 64, 4),
        (65, 64, 4),
        (100, 100, 16),
        (300, 300, 16),
        (1000, 1000, 16),
        (2000, 1000, 16),
        (1000, 20, 2),
        (20, 1000, 16),
        (1000, 3000, 16),
        (3000, 3000, 16),
    ],
)
def test_all_deliveries_of_a_fleet_stay_within_the_budget(prefill: int, decode: int, frontends: int) -> None:
    assert deliveries_per_s(FleetSizes(fleet(prefill, decode, frontends))) <= BUDGET_PER_S


def test_a_thousand_of_each_with_16_frontends_use_the_budget_and_no_more() -> None:
    sizes = FleetSizes(fleet(1000, 1000, 16))
    assert 0.9 * BUDGET_PER_S < deliveries_per_s(sizes) <= BUDGET_PER_S
    assert sizes.followings("prefill") == 0
    assert sizes.queries_per_s() == QUERIES_PER_S / 1000
    assert 1.0 < sizes.kv_events_rest_s("decode") < 2.5


def test_in_a_small_fleet_everything_is_followed_and_sent_as_soon_as_it_may_be() -> None:
    sizes = FleetSizes(fleet(20, 20, 4))
    assert sizes.followings("prefill") == 400
    for role in ("decode", "prefill"):
        assert sizes.heartbeat_rest_s(role) == sizes.kv_events_rest_s(role) == MIN_INTERVAL_S


def test_prefill_instances_without_followers_publish_seldom() -> None:
    assert FleetSizes(fleet(65, 64, 1)).kv_events_rest_s("prefill") == MAX_INTERVAL_S


def test_a_decode_instance_follows_until_the_fleet_is_large_and_then_asks() -> None:
    book = fleet(64, 64, 1)
    following = SubscriptionChoice(book)
    changes: list[bool] = []
    following.on_change(lambda: changes.append(following.queries_instances))
    assert not following.queries_instances
    assert following.followed.of_role("prefill") == book.of_role("prefill")
    (joined,) = instances("prefill", 1, 64, model="another")
    book.put(joined.instance_id, joined)
    assert following.queries_instances
    assert not len(following.followed)
    book.remove("prefill-00007")
    assert following.queries_instances, "it does not switch to and fro"
    for one in instances("prefill", 20):
        book.remove(one.instance_id)
    assert not following.queries_instances
    assert following.followed.of_role("prefill") == book.of_role("prefill")
    assert changes == [True, False]


def test_followed_instances_come_and_go_with_the_mesh() -> None:
    book = fleet(3, 2, 1)
    following = SubscriptionChoice(book)
    again = record("prefill-00001", "e2", role="prefill", model="m")
    book.put(again.instance_id, again)
    book.remove("prefill-00002")
    (joined,) = instances("prefill", 1, 9)
    book.put(joined.instance_id, joined)
    assert following.followed.of_role("prefill") == book.of_role("prefill")
    assert following.followed.find("prefill", again.instance_id, "e2") == again


class Counting:
    """A bus that counts batches and the blocks in them."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def publish_bytes(self, _subject: str, data: bytes) -> None:
        self.batches.append(len(unpack_batch(data).stored))


def test_a_busy_worker_publishes_a_batch_of_kv_events_as_often_as_it_may() -> None:
    """Changes between two batches are in the next one."""

    async def test() -> None:
        bus = Counting()
        publisher = KvEventPublisher(bus, "ns.prefill.w", "w", lambda: "e1", rest_s=lambda: 1.3)
        async with background(publisher.run(), "kv-events"):
            for number in range(1000):
                publisher.record([(number.to_bytes(16, "little"), True)])
                await asyncio.sleep(0.01)
        assert len(bus.batches) == 8
        assert all(count == pytest.approx(130, abs=2) for count in bus.batches[1:])

    run_virtually(test)
