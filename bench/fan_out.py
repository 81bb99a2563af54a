"""Deliveries of heartbeats, KV events and queries through one NATS server: python -m bench.fan_out --prefill 200

Every instance has its own connection and runs the services' code, but workers have no engine, and etcd is not used.
Half of the prompts begin with one of 64 prefixes. Prints a JSON line: messages sent and delivered per second, counted
by the server and computed, queries per prompt, time to all answers, and instances that counted as lost.
"""

import asyncio
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from queue import Empty
from random import Random
from typing import Annotated, Final
from urllib.request import urlopen

import typer
import uvloop

from components.aio import background
from components.discovery.book import InstanceBook
from components.messaging.call_server import serve_calls
from components.messaging.connection import connect_bus
from components.messaging.fan_out import FleetSizes, SubscriptionChoice
from components.messaging.fleet import Fleet, open_fleet
from components.messaging.heartbeat_sender import HeartbeatSender, heartbeat_of
from components.messaging.kv_publisher import KvEventPublisher
from components.messaging.liveness import OnLost, watch_heartbeats
from components.process import subject_of
from components.routing.policies import DEFAULT
from components.routing.policy import PromptLoad, RouteRequest
from components.wire.codec import OLDEST, PROTOCOL
from components.wire.heartbeat import Heartbeat
from components.wire.instances import InstanceRecord, Role
from components.wire.step_stats import StepStats
from components.wire.tokens import PromptBlocks, pack_tokens
from services.local.servers import NATS, running

NAMESPACE: Final = "fan-out"
MODEL: Final = "mock"
STEPS_PER_S: Final = 4_000  # steps of all workers together
SOONEST_STEP_S: Final = 0.02
CACHED: Final = 64  # cached blocks per worker; each step adds one and removes the oldest
PREFIXES: Final = 64
PREFIX_TOKENS: Final = 2048
QUESTION_TOKENS: Final = 512
WARM_UP_S: Final = 8.0  # time after the last connection
START_TIMEOUT_S: Final = 180.0


def record(role: Role, number: int) -> InstanceRecord:
    instance_id = f"{role}-{Random(f'{role}{number}').randbytes(4).hex()}"
    return InstanceRecord(
        instance_id=instance_id,
        epoch="1",
        role=role,
        host="bench",
        pid=1,
        started_unix_ms=0,
        subject=subject_of(NAMESPACE, role, instance_id),
        model=None if role == "frontend" else MODEL,
        kv_events=role != "frontend",
        protocol=PROTOCOL,
        oldest_protocol=OLDEST,
    )


def fleet_of(prefill: int, decode: int, frontends: int) -> list[InstanceRecord]:
    counts: dict[Role, int] = {"prefill": prefill, "decode": decode, "frontend": frontends}
    return [record(role, number) for role, count in counts.items() for number in range(count)]


def book_of(records: list[InstanceRecord]) -> InstanceBook:
    book = InstanceBook()
    for one in records:
        book.put(one.instance_id, one)
    return book


class Steps:
    def __init__(self, about: InstanceRecord, each_s: float) -> None:
        self._about = about
        self._each_s = each_s
        self._step = 0
        self._draw = Random(about.instance_id)
        self._blocks: list[bytes] = []

    def heartbeat(self) -> Heartbeat:
        stats = StepStats(step=self._step, num_running=9, free_pages=100, held_pages=900, total_pages=1000)
        about = self._about
        return heartbeat_of(
            about.instance_id, about.epoch, stats, PromptLoad(500, 9e3), draining=False, accepted=self._step
        )

    async def run(self, heart: HeartbeatSender, events: KvEventPublisher) -> None:
        await asyncio.sleep(self._draw.uniform(0, self._each_s))
        while True:
            self._step += 1
            heart.stepped(self._step)
            self._blocks.append(self._draw.randbytes(16))
            changes = [(self._blocks[-1], True)]
            if len(self._blocks) > CACHED:
                changes.append((self._blocks.pop(0), False))
            events.record(changes)
            await asyncio.sleep(self._each_s)


class Prompts:
    def __init__(self, each_s: float, signals: "Signals") -> None:
        self._each_s = each_s
        self._signals = signals

    async def run(self, fleet: Fleet, draw: Random) -> None:
        candidate_queries = fleet.candidate_queries
        assert candidate_queries is not None
        while True:
            await asyncio.sleep(draw.expovariate(1 / self._each_s))
            prefix = draw.randrange(PREFIXES) if draw.random() < 0.5 else draw.getrandbits(31)
            shared = Random(prefix).choices(range(1000), k=PREFIX_TOKENS)
            blocks = PromptBlocks(pack_tokens([*shared, *draw.choices(range(1000), k=QUESTION_TOKENS)]), b"")
            if not candidate_queries.are_needed:
                continue
            began_s = time.monotonic()
            query = await candidate_queries.query(RouteRequest(blocks.num_tokens), blocks, fleet.alive.usable(MODEL))
            if self._signals.warm.is_set() and not self._signals.stop.is_set():
                self._signals.queries.put((query.num_asked, len(query.answered), time.monotonic() - began_s))


@asynccontextmanager
async def worker(
    url: str, about: InstanceRecord, book: InstanceBook, sizes: FleetSizes, prompts: "Prompts", on_lost: OnLost
) -> AsyncIterator[None]:
    num_workers = sizes.count("prefill") + sizes.count("decode")
    steps, role = Steps(about, max(SOONEST_STEP_S, num_workers / STEPS_PER_S)), about.role
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        bus = await enter(connect_bus(url, about.instance_id))
        rest_s = partial(sizes.kv_events_rest_s, role)
        events = await enter(
            KvEventPublisher(bus, about.subject, about.instance_id, lambda: about.epoch, rest_s=rest_s).running()
        )
        await enter(serve_calls(bus, role, about.subject, events.endpoints(), {}))
        if role == "decode":
            following = SubscriptionChoice(book)
            fleet = await enter(open_fleet(bus, NAMESPACE, "prefill", book, DEFAULT["prefill"], following=following))
            fleet.alive.on_lost(on_lost)
            await enter(background(prompts.run(fleet, Random(about.instance_id)), "prompts"))
        rest_s = partial(sizes.heartbeat_rest_s, role)
        heart = await enter(
            HeartbeatSender(bus, about.subject, steps.heartbeat, rest_s, events.log.num_cached).running()
        )
        await enter(background(steps.run(heart, events), "steps"))
        yield


@asynccontextmanager
async def frontend(url: str, about: InstanceRecord, book: InstanceBook, on_lost: OnLost) -> AsyncIterator[None]:
    async with (
        connect_bus(url, about.instance_id) as bus,
        open_fleet(bus, NAMESPACE, "decode", book, DEFAULT["decode"]) as fleet,
    ):
        fleet.alive.on_lost(on_lost)
        yield


@asynccontextmanager
async def planner(url: str, book: InstanceBook) -> AsyncIterator[None]:
    async with (
        connect_bus(url, "planner") as bus,
        watch_heartbeats(bus, NAMESPACE, "prefill", book),
        watch_heartbeats(bus, NAMESPACE, "decode", book),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Signals:
    ready: Semaphore  # released by each instance
    stop: Event
    lost: Semaphore  # released for each instance that counts as lost
    warm: Event
    queries: "Queue[tuple[int, int, float]]"  # queried instances, answers, seconds


async def run_share(url: str, records: list[InstanceRecord], share: range, each_s: float, signals: Signals) -> None:
    def lose(_record: InstanceRecord, _why: str) -> None:
        if signals.warm.is_set() and not signals.stop.is_set():
            signals.lost.release()

    book = book_of(records)
    sizes = FleetSizes(book)
    prompts = Prompts(each_s, signals)
    async with AsyncExitStack() as stack:
        if share.start == 0:
            await stack.enter_async_context(planner(url, book))
        for at in share:
            about = records[at]
            is_frontend = about.role == "frontend"
            instance = (
                frontend(url, about, book, lose) if is_frontend else worker(url, about, book, sizes, prompts, lose)
            )
            await stack.enter_async_context(instance)
            signals.ready.release()
        await asyncio.to_thread(signals.stop.wait)


def process(url: str, sizes: tuple[int, int, int], share: range, each_s: float, signals: Signals) -> None:
    """Run a share of the instances."""
    logging.disable(logging.WARNING)
    uvloop.run(run_share(url, fleet_of(*sizes), share, each_s, signals))


def counted(monitor_url: str) -> tuple[int, int, float]:
    with urlopen(f"{monitor_url}/varz") as answer:
        page = json.load(answer)
    return page["in_msgs"], page["out_msgs"], time.monotonic()


def computed(sizes: FleetSizes) -> dict[str, float]:
    """Return the computed deliveries per second of each kind if all workers are busy, including the planner's."""
    rates = {}
    for role in ("decode", "prefill"):
        followings, instances = sizes.followings(role), sizes.count(role)
        rates[f"{role}_heartbeats"] = (followings + instances) / sizes.heartbeat_rest_s(role)
        rates[f"{role}_kv_events"] = followings / sizes.kv_events_rest_s(role)
    return rates


async def measure(
    sizes: tuple[int, int, int], processes: int, seconds: float, prompts_per_s: float
) -> dict[str, object]:
    """Run the instances and count. Raises: TimeoutError, if the instances do not connect in time."""
    records = fleet_of(*sizes)
    fleet = FleetSizes(book_of(records))
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Semaphore(0), context.Event(), context.Semaphore(0), context.Event(), context.Queue())
    each_s = sizes[1] / prompts_per_s
    with tempfile.TemporaryDirectory() as home:
        async with running(NATS, Path(home) / "nats", is_monitored=True) as nats:
            started = [
                context.Process(
                    target=process, args=(nats.url, sizes, range(at, len(records), processes), each_s, signals)
                )
                for at in range(processes)
            ]
            try:
                for one in started:
                    one.start()
                for _ in records:
                    if not await asyncio.to_thread(signals.ready.acquire, timeout=START_TIMEOUT_S):
                        raise TimeoutError(f"{len(records)} instances did not connect in {START_TIMEOUT_S} s")
                await asyncio.sleep(WARM_UP_S)
                signals.warm.set()
                in_before, out_before, before_s = counted(nats.monitor_url)
                await asyncio.sleep(seconds)
                in_after, out_after, after_s = counted(nats.monitor_url)
            finally:
                signals.stop.set()
                queries = list(_drained(signals.queries))
                for one in started:
                    await asyncio.to_thread(one.join)
    lost = 0
    while signals.lost.acquire(block=False):
        lost += 1
    passed_s = after_s - before_s
    questions_per_s = sum(num_asked for num_asked, _, _ in queries) / passed_s
    by_kind = computed(fleet) | {"questions": 2 * questions_per_s}
    sent = sum(
        fleet.count(role) * (1 / fleet.heartbeat_rest_s(role) + 1 / fleet.kv_events_rest_s(role))
        for role in ("decode", "prefill")
    )
    waits_ms = sorted(1000 * wait_s for _, _, wait_s in queries)
    return {
        "prefill": sizes[0],
        "decode": sizes[1],
        "frontends": sizes[2],
        "pairs_followed": fleet.followings("prefill"),
        "heartbeat_s": {role: round(fleet.heartbeat_rest_s(role), 3) for role in ("decode", "prefill")},
        "kv_events_s": {role: round(fleet.kv_events_rest_s(role), 3) for role in ("decode", "prefill")},
        "sent_per_s": round((in_after - in_before) / passed_s),
        "sent_per_s_computed": round(sent + 2 * questions_per_s),
        "deliveries_per_s": round((out_after - out_before) / passed_s),
        "deliveries_per_s_computed": round(sum(by_kind.values())),
        "lost": lost,
        "prompts": len(queries),
        "asked_per_prompt": round(sum(one[0] for one in queries) / max(len(queries), 1), 2),
        "unanswered": sum(num_asked - num_answered for num_asked, num_answered, _ in queries),
        "asking_ms": {p: round(waits_ms[len(waits_ms) * p // 100], 2) for p in (50, 99)} if waits_ms else {},
        "computed_by_kind": {kind: round(rate) for kind, rate in by_kind.items()},
    }


def _drained(queue: "Queue[tuple[int, int, float]]") -> Iterator[tuple[int, int, float]]:
    with suppress(Empty):
        while True:
            yield queue.get(timeout=0.5)


def main(
    prefill: Annotated[int, typer.Option(help="prefill instances", min=1)] = 100,
    decode: Annotated[int, typer.Option(help="decode instances", min=1)] = 100,
    frontends: Annotated[int, typer.Option(help="frontends", min=1)] = 4,
    processes: Annotated[int, typer.Option(help="processes that run the instances", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="duration of the measurement", min=1.0)] = 20.0,
    prompts_per_s: Annotated[
        float, typer.Option(help="prompts per second of all decode instances together", min=0.01)
    ] = 100.0,
) -> None:
    print(json.dumps(asyncio.run(measure((prefill, decode, frontends), processes, seconds, prompts_per_s))))


if __name__ == "__main__":
    typer.run(main)
