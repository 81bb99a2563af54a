"""The instances of one role as a process sees them, and the choice among them."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from prometheus_client import CollectorRegistry

from components.discovery.book import InstanceBook
from components.messaging.bus import Bus
from components.messaging.fan_out import SubscriptionChoice
from components.messaging.kv_subscriber import KvMirror, follow_kv_events
from components.messaging.liveness import InstanceState, Liveness, Loss, watch_heartbeats
from components.messaging.load_queries import ANSWER_TIMEOUT_S, LoadQueries
from components.routing.candidates import CandidateChoice, CandidateQuery, depths
from components.routing.kv_index import MAX_BLOCKS, KvIndex
from components.routing.policies import WorkerRole, parse_policy
from components.routing.policy import RouteRequest
from components.routing.router import Router
from components.telemetry.on_demand import OnDemand
from components.wire.instances import InstanceRecord
from components.wire.tokens import PromptBlocks


class Fleet:
    def __init__(
        self,
        book: InstanceBook,
        alive: Liveness,
        role: WorkerRole,
        policy: str,
        rng: Random | None = None,
        *,
        kv_index_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.rng = rng = rng or Random()
        self.alive = alive
        self.policy = parse_policy(policy)
        self.index = KvIndex(kv_index_blocks) if self.policy.uses_caches(role) else None
        or_none = role == "prefill"  # decode can compute prompts itself
        self.router = Router(self.policy.make(role, rng), rng, time.monotonic, self.index, or_none=or_none)
        self.candidate_queries: CandidateQueries | None = None  # if the fleet may be too large to subscribe to
        book.follow(role, self._changed)
        alive.on_heartbeat(self.router.record_heartbeat)

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None and now is not None and was.epoch == now.epoch:
            return
        if was is not None:
            self.router.left(was.instance_id)
        if now is not None:
            page_size = None if now.kv is None else now.kv.layout.page_size
            devices = 1 if now.kv is None else len(now.kv.devices)
            self.router.joined(now.instance_id, now.epoch, page_size, kv_events=now.kv_events, devices=devices)


class CandidateQueries:
    def __init__(self, fleet: Fleet, role: WorkerRole, following: SubscriptionChoice, queries: LoadQueries) -> None:
        self._fleet = fleet
        self._role: WorkerRole = role
        self._following = following
        self._queries = queries
        self._candidates = CandidateChoice(fleet.rng)

    @property
    def are_needed(self) -> bool:
        return self._following.queries_instances

    async def query(self, ask: RouteRequest, blocks: PromptBlocks, usable: Sequence[InstanceRecord]) -> CandidateQuery:
        """Query some of `usable` until one can start the prompt at once, or enough have been queried.

        Args:
            usable: candidates; the same sequence while they are the same.
        """
        router = self._fleet.router
        query, began_s = CandidateQuery(router, ask), router.now_s
        page_sizes = {record.instance_id: _page_size(record) for record in usable}
        prefixes = {size: depths(len(blocks(size)), size) for size in set(page_sizes.values())}
        hashes = {size: [blocks(size)[depth - 1] for depth in found] for size, found in prefixes.items()}
        key = self._fleet.policy.meeting_key(self._role, ask)
        keys = hashes[min(hashes)] if hashes and key is None else []
        for candidates in self._candidates.rounds(keys or [key or ask.prefix or self._fleet.rng.randbytes(16)], usable):
            if router.now_s - began_s > ANSWER_TIMEOUT_S:
                break
            records = [usable[at] for at in candidates[: self._queries.reserve(len(candidates))]]
            if not records:
                query.add_fallbacks(usable[at].instance_id for at in candidates)
                break
            wanted = {record.instance_id: b"".join(hashes[page_sizes[record.instance_id]]) for record in records}
            answers = await self._queries.ask(records, wanted)
            cached = {
                i: _tokens(prefixes[page_sizes[i]], page_sizes[i], found)
                for i, found in answers.items()
                if found is not None
            }
            query.add_answers(len(records), cached)
            query.add_fallbacks(i for i in answers if i not in cached)
            if query.is_enough:
                break
        return query


def _page_size(record: InstanceRecord) -> int:
    return 16 if record.kv is None else record.kv.layout.page_size


def _tokens(prefixes: Sequence[int], page_size: int, num_cached: int) -> int:
    """Tokens up to the last cached depth. `num_cached`, another process's, may be wrong."""
    at = min(num_cached, len(prefixes))
    return prefixes[at - 1] * page_size if at > 0 else 0


@asynccontextmanager
async def open_fleet(
    bus: Bus,
    namespace: str,
    role: WorkerRole,
    book: InstanceBook,
    policy: str,
    *,
    rng: Random | None = None,
    kv_index_blocks: int = MAX_BLOCKS,
    metrics: CollectorRegistry | None = None,
    following: SubscriptionChoice | None = None,
) -> AsyncIterator[Fleet]:
    """Watch the fleet of a role.

    Args:
        metrics: shows the instances and the KV index.
        following: whether to subscribe to instances or query them; None: subscribe.
    """
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        alive = await enter(watch_heartbeats(bus, namespace, role, book, following))
        if metrics is not None:
            show_instances(metrics, alive)
        fleet = Fleet(book, alive, role, policy, rng, kv_index_blocks=kv_index_blocks)
        if fleet.index is not None:
            followed = book if following is None else following.followed
            mirroring = follow_kv_events(
                bus, namespace, role, followed, fleet.index, rng=fleet.rng, following=following
            )
            mirror = await enter(mirroring)
            if metrics is not None:
                show_kv_mirror(metrics, fleet.index, mirror)
        if following is not None:
            queries = await enter(LoadQueries(bus, alive, following.sizes.queries_per_s, fleet.rng).running())
            fleet.candidate_queries = CandidateQueries(fleet, role, following, queries)
        yield fleet


def show_instances(metrics: CollectorRegistry, *alive: Liveness) -> None:
    """How many instances of these roles this process sees, and has lost."""
    shown = OnDemand(metrics)
    shown.gauge(
        "kvmesh_instances",
        "Instances by state, as this process sees them.",
        lambda: {(one.role, state): one.states()[state] for one in alive for state in InstanceState},
        ["role", "state"],
    )
    shown.counter(
        "kvmesh_instances_lost",
        "Instances that this process lost, by reason; `drained` is an orderly departure.",
        lambda: {(one.role, loss): one.losses[loss] for one in alive for loss in Loss},
        ["role", "reason"],
    )


def show_kv_mirror(metrics: CollectorRegistry, index: KvIndex, mirror: KvMirror) -> None:
    shown, counts = OnDemand(metrics), mirror.counts
    shown.gauge("kvmesh_kv_index_blocks", "Blocks in the KV index, of all instances.", lambda: index.num_blocks)
    shown.gauge("kvmesh_kv_index_max_blocks", "Blocks that the KV index may hold.", lambda: index.max_blocks)
    about = "Blocks missing from the KV index because it was full; an upper bound."
    shown.gauge("kvmesh_kv_index_missing_blocks", about, lambda: mirror.missing)
    about = "Blocks that the KV index refused because it was full."
    shown.counter("kvmesh_kv_index_refused_blocks", about, lambda: index.refused)
    shown.counter("kvmesh_kv_mirror_batches", "Batches of KV events received.", lambda: counts.batches)
    about = "Gaps in the numbers of these batches; each leads to a dump."
    shown.counter("kvmesh_kv_mirror_gaps", about, lambda: counts.gaps)
    shown.counter("kvmesh_kv_mirror_dumps", "Dumps of a whole prefix cache received.", lambda: counts.dumps)
    about = "Dumps of a prefix cache that failed."
    shown.counter("kvmesh_kv_mirror_failed_dumps", about, lambda: counts.failed_dumps)
