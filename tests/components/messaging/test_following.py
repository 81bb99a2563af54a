"""A decode instance over a real NATS follows the prefill instances of a small fleet, and queries those of a large one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from components.discovery.book import InstanceBook
from components.messaging import fan_out, load_queries
from components.messaging.bus import Bus
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.messaging.fan_out import SubscriptionChoice
from components.messaging.fleet import Fleet, open_fleet
from components.messaging.heartbeat_sender import HeartbeatSender
from components.messaging.kv_publisher import KvEventPublisher
from components.routing.candidates import CandidateQuery, depths
from components.routing.policy import RouteRequest
from components.wire.heartbeat import Heartbeat
from components.wire.tokens import PromptBlocks, pack_tokens, seed_hash
from tests.components.discovery.records import record
from tests.waiting import until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

NAMES = [f"p{number}" for number in range(8)]
PAGE = 16
PROMPT = range(2000)


def prompt_blocks(tokens: range = PROMPT) -> PromptBlocks:
    return PromptBlocks(pack_tokens(list(tokens)), seed_hash("m"))


class Worker:
    """A prefill instance without an engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step = 0
        self.queued = 0
        self.still = False
        self.draining = False
        self.events: KvEventPublisher | None = None
        self.heart: HeartbeatSender | None = None

    def beat(self) -> Heartbeat:
        if not self.still:
            self.step += 1
        return Heartbeat(
            instance_id=self.name,
            epoch="e1",
            step=self.step,
            busy=True,
            draining=self.draining,
            queued_tokens=self.queued,
            num_running=1,
        )

    def cache(self, *hashes: bytes) -> None:
        assert self.events is not None
        self.events.record([(block, True) for block in hashes])


class Scene:
    """Eight prefill instances, and a decode instance's view of them."""

    def __init__(self, bus: Bus, book: InstanceBook, following: SubscriptionChoice, fleet: Fleet) -> None:
        self.bus, self.book, self.following, self.fleet = bus, book, following, fleet
        self.workers = {name: Worker(name) for name in NAMES}
        self.running: dict[str, AsyncExitStack] = {}

    async def query(self, tokens: range = PROMPT, **ask: object) -> CandidateQuery:
        candidate_queries = self.fleet.candidate_queries
        assert candidate_queries is not None
        assert candidate_queries.are_needed
        blocks = prompt_blocks(tokens)
        return await candidate_queries.query(RouteRequest(len(tokens), **ask), blocks, self.fleet.alive.usable("m"))

    async def stop(self, name: str) -> None:
        """Let it answer no more, but stay in etcd."""
        await self.running.pop(name).aclose()


@pytest.fixture
async def scene(nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(fan_out, "ALL_PAIRS", 40)
    for limit in ("ANSWER_TIMEOUT_S", "CALL_TIMEOUT_S"):  # NATS refuses queries to a stopped instance at once
        monkeypatch.setattr(load_queries, limit, 5.0)
    book = InstanceBook()
    for name in NAMES:
        subject = f"{namespace}.prefill.{name}"
        book.put(name, record(name, role="prefill", model="m", subject=subject, kv_events=True))
    for number in range(8):
        book.put(f"d{number}", record(f"d{number}", model="m"))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers, bus = await enter(connect_bus(nats_url, "workers")), await enter(connect_bus(nats_url, "decode"))
        following = SubscriptionChoice(book)
        fleet = await enter(open_fleet(bus, namespace, "prefill", book, "kv_aware", following=following))
        made = Scene(bus, book, following, fleet)
        for name, worker in made.workers.items():
            running = made.running[name] = AsyncExitStack()
            stack.push_async_callback(running.aclose)
            subject = f"{namespace}.prefill.{name}"
            events = await running.enter_async_context(KvEventPublisher(workers, subject, name, lambda: "e1").running())
            worker.events = events
            await running.enter_async_context(serve_calls(workers, "prefill", subject, events.endpoints(), {}))
            worker.heart = await running.enter_async_context(
                HeartbeatSender(workers, subject, worker.beat, lambda: 0.05, events.log.num_cached).running()
            )
        yield made


async def test_a_large_fleet_is_asked_and_not_followed(scene: Scene) -> None:
    assert scene.following.queries_instances
    before = scene.bus.client.stats["in_msgs"]
    await asyncio.sleep(0.5)
    assert scene.bus.client.stats["in_msgs"] == before
    assert {one.instance_id for one in scene.fleet.alive.usable("m")} == set(NAMES)
    query = await scene.query()
    assert 0 < query.num_asked == len(query.answered)
    assert query.choose() is not None


async def test_the_instance_that_has_the_prompt_cached_is_found(scene: Scene) -> None:
    """Prompts with the same beginning query the same instances; the one that computed it reports its cached tokens."""
    first = (await scene.query()).choose()
    assert first is not None
    blocks = prompt_blocks()(PAGE)
    deep = depths(len(blocks), PAGE)[-2]
    scene.workers[first.instance_id].cache(*[blocks[at] for at in range(deep)])
    for tokens in (PROMPT, range(1999), range(2100)):
        again = (await scene.query(tokens)).choose()
        assert again is not None
        assert (again.instance_id, again.cached_tokens) == (first.instance_id, deep * PAGE)


async def test_more_are_asked_while_those_that_answered_have_queues(scene: Scene) -> None:
    for worker in scene.workers.values():
        worker.queued = 100_000
    few = depths(len(prompt_blocks()(PAGE)), PAGE)
    query = await scene.query()
    assert query.num_asked == len(NAMES)
    assert len(few) < len(NAMES)


async def test_an_instance_that_does_not_answer_costs_one_prompt_a_moment_and_is_lost_in_seconds(scene: Scene) -> None:
    chosen = (await scene.query()).choose()
    assert chosen is not None
    lost: list[tuple[str, str]] = []
    scene.fleet.alive.on_lost(lambda record, why: lost.append((record.instance_id, why)))
    await scene.stop(chosen.instance_id)
    other = (await scene.query()).choose()
    assert other is not None
    assert other.instance_id != chosen.instance_id
    await until(lambda: lost)
    assert [name for name, _ in lost] == [chosen.instance_id]
    assert lost[0][1].startswith("silent for")
    assert chosen.instance_id not in {one.instance_id for one in scene.fleet.alive.usable("m")}


async def test_a_lost_instance_is_asked_until_it_answers(scene: Scene, namespace: str, nats_url: str) -> None:
    chosen = (await scene.query()).choose()
    assert chosen is not None
    name, alive = chosen.instance_id, scene.fleet.alive
    await scene.stop(name)
    await scene.query()
    await until(lambda: alive.is_lost(name))
    subject = f"{namespace}.prefill.{name}"
    async with (
        connect_bus(nats_url, "again") as bus,
        HeartbeatSender(bus, subject, scene.workers[name].beat, lambda: 0.05).running(),
    ):
        await until(lambda: not alive.is_lost(name))
        assert alive.is_usable(name)


async def test_an_instance_is_asked_while_something_depends_on_it(scene: Scene) -> None:
    lost: list[str] = []
    scene.fleet.alive.on_lost(lambda record, _why: lost.append(record.instance_id))
    with scene.fleet.alive.watching("p3"):
        await until(lambda: scene.fleet.alive.last_heartbeat("p3") is not None)
        await scene.stop("p3")
        await scene.stop("p4")
        await until(lambda: lost)
    assert lost == ["p3"], "nothing is asked of p4, so nothing is known"


async def test_a_stalled_or_draining_instance_gets_no_work_until_it_reports_otherwise(scene: Scene) -> None:
    alive = scene.fleet.alive
    scene.workers["p1"].draining = True
    with alive.watching("p1"), alive.watching("p2"):
        await until(lambda: not alive.is_usable("p1"))
        scene.workers["p2"].still = True
        await until(lambda: not alive.is_usable("p2"))
    for _ in range(5):
        query = await scene.query()
        assert not {"p1", "p2"} & set(query.answered)
    scene.workers["p1"].draining = scene.workers["p2"].still = False
    await until(lambda: alive.is_usable("p1") and alive.is_usable("p2"))


async def test_without_questions_left_a_candidate_is_chosen_unasked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "QUERIES_PER_S", 0)
    asked = 0
    while (query := await scene.query()).num_asked:
        asked += query.num_asked
        assert asked < 100
    before = scene.bus.client.stats["out_msgs"]
    chosen = query.choose()
    assert chosen is not None
    assert scene.bus.client.stats["out_msgs"] == before


async def test_a_fleet_that_becomes_small_is_followed_and_a_large_one_asked_again(scene: Scene) -> None:
    """The two sizes differ, so it does not switch back and forth."""
    index, alive = scene.fleet.index, scene.fleet.alive
    assert index is not None
    scene.workers["p0"].cache(b"block".ljust(16))
    kept = {name: scene.book.find("prefill", name) for name in NAMES}
    for name in NAMES[6:]:
        scene.book.remove(name)
    assert scene.following.queries_instances, "48 pairs are more than 40, and so were 30 at first"
    for name in NAMES[3:6]:
        scene.book.remove(name)
    assert not scene.following.queries_instances
    await until(lambda: index.blocks_of("p0"))
    await until(lambda: all(alive.last_heartbeat(name) for name in NAMES[:3]))
    for name in NAMES[3:]:
        found = kept[name]
        assert found is not None
        scene.book.put(name, found)
    assert scene.following.queries_instances
    assert not index.blocks_of("p0")
    assert (await scene.query()).choose() is not None


@pytest.mark.parametrize(
    "policy", ["round_robin", "consistent_hashing", "prefix_hash", "session_affinity", "least_load"]
)
async def test_every_policy_chooses_among_those_that_answer(scene: Scene, namespace: str, policy: str) -> None:
    """With a session policy, requests of one session go to one instance."""
    watching = open_fleet(scene.bus, namespace, "prefill", scene.book, policy, following=scene.following)
    async with watching as fleet:
        candidate_queries = fleet.candidate_queries
        assert candidate_queries is not None
        found = set()
        for first in range(8):
            blocks = prompt_blocks(range(first, first + 900))
            ask = RouteRequest(900, session="s", prefix=blocks.prefix())
            chosen = (await candidate_queries.query(ask, blocks, fleet.alive.usable("m"))).choose()
            assert chosen is not None
            found.add(chosen.instance_id)
        assert len(found) == 1 if policy in {"consistent_hashing", "session_affinity"} else len(found) > 1
