"""Who follows whom in large fleets, and how often instances may send: the total stays within the budget."""

import asyncio
import statistics
from collections import Counter
from random import Random

import pytest

from components.aio import background
from components.discovery.book import InstanceBook
from components.messaging.fan_out import (
    DELIVERIES_PER_S,
    FOLLOWED,
    LINGER_S,
    PARTIAL_CACHE_WORTH,
    SOONEST_S,
    FleetSizes,
    Following,
    followed,
    num_followed,
)
from components.messaging.fleet import Fleet
from components.messaging.heartbeats import Liveness
from components.messaging.kv_publisher import KvEventPublisher
from components.wire.instances import InstanceRecord, Role
from components.wire.kv_events import unpack_batch
from tests.components.discovery.records import record
from tests.faults.virtual_loop import run_virtually

BUDGET_PER_S = 50_000  # of all heartbeats and KV events together


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


def ids(book: InstanceBook) -> set[str]:
    return {one.instance_id for one in book.of_role("prefill")}


def shares(prefill: int, decode: int) -> dict[str, set[str]]:
    """What each decode instance of a fleet follows."""
    prefills = instances("prefill", prefill)
    count = num_followed(prefill, decode)
    return {
        one.instance_id: {p.instance_id for p in followed(one.instance_id, prefills, count)}
        for one in instances("decode", decode)
    }


def deliveries_per_s(sizes: FleetSizes) -> float:
    """Of all heartbeats and KV events, with all workers busy and one planner."""
    roles: tuple[Role, ...] = ("decode", "prefill")
    return sum(
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
    ],
)
def test_all_deliveries_of_a_fleet_stay_within_the_budget(prefill: int, decode: int, frontends: int) -> None:
    assert deliveries_per_s(FleetSizes(fleet(prefill, decode, frontends))) <= BUDGET_PER_S


def test_a_thousand_of_each_with_16_frontends_use_the_budget_and_no_more() -> None:
    sizes = FleetSizes(fleet(1000, 1000, 16))
    assert deliveries_per_s(sizes) == pytest.approx(4 * DELIVERIES_PER_S)
    assert sizes.followed("m") == FOLLOWED
    assert 1.0 < sizes.heartbeat_rest_s("prefill") < 1.5
    assert 1.0 < sizes.kv_events_rest_s("decode") < 1.5


def test_in_a_small_fleet_everything_is_followed_and_sent_as_soon_as_it_may_be() -> None:
    sizes = FleetSizes(fleet(20, 20, 4))
    assert sizes.followed("m") == 20
    assert sizes.cache_worth == 1.0
    for role in ("decode", "prefill"):
        assert sizes.heartbeat_rest_s(role) == sizes.kv_events_rest_s(role) == SOONEST_S


def test_the_followings_of_each_model_count_for_themselves() -> None:
    records = [*instances("prefill", 900, model="a"), *instances("decode", 100, model="a")]
    records += [*instances("prefill", 100, 900, model="b"), *instances("decode", 900, 100, model="b")]
    sizes = FleetSizes(book_of(*records))
    assert sizes.followings("prefill") == 100 * sizes.followed("a") + 900 * sizes.followed("b")
    assert sizes.followed("a") == 144
    assert sizes.followed("b") == 16
    assert sizes.cache_worth == PARTIAL_CACHE_WORTH


def test_sizes_change_with_the_book() -> None:
    book = fleet(70, 64, 1)
    sizes = FleetSizes(book)
    assert sizes.cache_worth == PARTIAL_CACHE_WORTH
    for one in instances("prefill", 10):
        book.remove(one.instance_id)
    assert sizes.count("prefill") == sizes.followed("m") == 60
    assert sizes.cache_worth == 1.0


@pytest.mark.parametrize(("prefill", "decode"), [(1000, 1000), (300, 300), (1000, 100), (100, 1000)])
def test_each_prefill_instance_is_followed_by_about_as_many_decode_instances(prefill: int, decode: int) -> None:
    """Rendezvous hashing spreads followers as draws do: around the mean with a deviation of its root, at most."""
    shared = shares(prefill, decode)
    followers = Counter(name for names in shared.values() for name in names)
    counts = [followers[one.instance_id] for one in instances("prefill", prefill)]
    mean = statistics.mean(counts)
    assert mean == pytest.approx(decode * num_followed(prefill, decode) / prefill)
    assert mean >= FOLLOWED
    assert statistics.pstdev(counts) <= 1.1 * mean**0.5
    assert min(counts) >= mean / 5
    assert max(counts) <= 2.2 * mean


def test_an_instance_that_leaves_is_replaced_at_its_followers_alone() -> None:
    prefills = instances("prefill", 1000)
    gone, left = prefills[123], [*prefills[:123], *prefills[124:]]
    moved = 0
    for one in instances("decode", 1000):
        before = {p.instance_id for p in followed(one.instance_id, prefills, FOLLOWED)}
        after = {p.instance_id for p in followed(one.instance_id, left, FOLLOWED)}
        assert before - after <= {gone.instance_id}
        assert len(after) == FOLLOWED
        moved += len(after - before)
    assert moved <= 4 * FOLLOWED


def test_a_decode_instance_follows_all_until_the_fleet_is_large_and_then_its_share() -> None:
    async def test() -> None:
        book = fleet(64, 64, 1)
        following = Following(book, "decode-00000", "m")
        assert ids(following.chosen) == ids(book)
        assert not following.is_partial
        for one in instances("prefill", 1, 64):
            book.put(one.instance_id, one)
        assert following.is_partial
        assert len(ids(following.chosen)) == 64
        changes: list[bool] = []
        following.on_change(lambda: changes.append(following.is_partial))
        book.remove("prefill-00007")
        assert ids(following.chosen) == ids(book)
        assert changes[-1] is False

    run_virtually(test)


def test_a_lost_instance_is_replaced_at_once() -> None:
    async def test() -> None:
        book = fleet(200, 200, 1)
        following = Following(book, "decode-00003", "m")
        before = ids(following.chosen)
        lost = min(before)
        book.remove(lost)
        assert lost not in ids(following.watched)
        assert len(ids(following.chosen)) == len(before)
        assert ids(following.chosen) > before - {lost}

    run_virtually(test)


def test_an_instance_that_is_not_followed_any_more_is_watched_until_its_transfers_are_over() -> None:
    """It gets no new work, but what it is sending must not count as lost."""

    async def test() -> None:
        book = fleet(200, 200, 1)
        following = Following(book, "decode-00003", "m")
        before = ids(following.chosen)
        joined = instances("prefill", 200, 200)
        for one in joined:
            book.put(one.instance_id, one)
        dropped = before - ids(following.chosen)
        assert dropped
        assert ids(following.watched) >= ids(following.chosen) | dropped
        again = record(min(dropped), "e2", role="prefill", model="m")
        book.put(again.instance_id, again)
        assert following.watched.find(again.instance_id, "e2") == again
        await asyncio.sleep(LINGER_S + 1)
        assert ids(following.watched) == ids(following.chosen)

    run_virtually(test)


def test_a_frontend_values_caches_more_while_decode_instances_follow_only_a_share() -> None:
    book = fleet(80, 64, 1)
    decodes = Fleet(book, Liveness(book, "decode"), "decode", "least_load", Random(0))
    assert decodes.router.cache_worth == PARTIAL_CACHE_WORTH
    for one in instances("prefill", 20):
        book.remove(one.instance_id)
    assert decodes.router.cache_worth == 1.0
    prefills = Fleet(book, Liveness(book, "prefill"), "prefill", "least_load", Random(0))
    for one in instances("prefill", 20):
        book.put(one.instance_id, one)
    assert decodes.router.cache_worth == PARTIAL_CACHE_WORTH
    assert prefills.router.cache_worth == 1.0


class Counting:
    """A bus that counts batches and the blocks in them."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def publish_bytes(self, _subject: str, data: bytes) -> None:
        self.batches.append(len(unpack_batch(data).stored))


def test_a_busy_worker_publishes_a_batch_of_kv_events_as_often_as_it_may() -> None:
    """What its cache gains meanwhile leaves with the next batch."""

    async def test() -> None:
        bus = Counting()
        publisher = KvEventPublisher(bus, "ns.prefill.w", "w", lambda: "e1", rest_s=lambda: 1.3)
        async with background(publisher.run(), "kv-events"):
            for number in range(1000):
                publisher.take([(number.to_bytes(16, "little"), True)])
                await asyncio.sleep(0.01)
        assert len(bus.batches) == 8
        assert all(count == pytest.approx(130, abs=2) for count in bus.batches[1:])

    run_virtually(test)


def test_other_models_are_not_followed() -> None:
    async def test() -> None:
        book = book_of(*instances("prefill", 3, model="other"), *instances("prefill", 2, 10))
        following = Following(book, "decode-00000", "m")
        assert ids(following.chosen) == {"prefill-00010", "prefill-00011"}
        for one in instances("prefill", 1, 20, model="other"):
            book.put(one.instance_id, one)
        assert len(ids(following.chosen)) == 2

    run_virtually(test)
