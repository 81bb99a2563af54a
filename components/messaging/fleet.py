"""The instances of one role as one process sees them: who is alive, and whose turn it is."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from prometheus_client import CollectorRegistry

from components.discovery.book import InstanceBook
from components.messaging.bus import Bus
from components.messaging.fan_out import FleetSizes, Following
from components.messaging.heartbeats import Liveness, watch_heartbeats
from components.messaging.kv_metrics import KvMirrorMetrics
from components.messaging.kv_subscriber import follow_kv_events
from components.routing.kv_index import MAX_BLOCKS, KvIndex
from components.routing.policies import Phase, looks_at_caches, make_policy
from components.routing.router import Router
from components.wire.instances import InstanceRecord


class Fleet:
    """`alive` knows who can be used, `router` whom to choose; both hear what etcd and heartbeats tell."""

    def __init__(
        self,
        book: InstanceBook,
        alive: Liveness,
        phase: Phase,
        policy: str,
        rng: Random | None = None,
        *,
        kv_index_blocks: int = MAX_BLOCKS,
    ) -> None:
        """Draws come from `rng`; None: a source of its own. `kv_index_blocks`: that are remembered of all caches, at most."""
        self.rng = rng = rng or Random()
        self.alive = alive
        self.policy = policy
        self.index = KvIndex(kv_index_blocks) if looks_at_caches(policy, phase) else None
        or_nobody = phase == "prefill"  # decode computes prompts itself
        self.router = Router(make_policy(policy, phase, rng), rng, time.monotonic, self.index, or_nobody=or_nobody)
        self._phase = phase
        self._sizes = FleetSizes(book) if phase == "decode" else None
        for record in book.of_role(phase):
            self._changed(None, record)
        book.subscribe(self._changed)
        alive.on_heard(self.router.heard)

    def _changed(self, was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        if was is not None and now is not None and was.epoch == now.epoch:
            return
        if was is not None and was.role == self._phase:
            self.router.left(was.instance_id)
        if now is not None and now.role == self._phase:
            page_size = None if now.kv is None else now.kv.layout.page_size
            self.router.joined(now.instance_id, now.epoch, page_size, tells_cache=now.kv_events)
        if self._sizes is not None:
            self.router.cache_worth = self._sizes.cache_worth


@asynccontextmanager
async def watch_fleet(
    bus: Bus,
    namespace: str,
    phase: Phase,
    book: InstanceBook,
    policy: str,
    *,
    rng: Random | None = None,
    kv_index_blocks: int = MAX_BLOCKS,
    metrics: CollectorRegistry | None = None,
    following: Following | None = None,
) -> AsyncIterator[Fleet]:
    """The fleet of a role, kept while inside; what its instances have cached only where the policy looks at it.

    `metrics` then shows how much that is. The fleet has the instances of `following`, or all in `book` if it is None.
    """
    watched, chosen = (book, book) if following is None else (following.watched, following.chosen)
    async with AsyncExitStack() as stack:
        alive = await stack.enter_async_context(watch_heartbeats(bus, namespace, phase, watched, following))
        fleet = Fleet(chosen, alive, phase, policy, rng, kv_index_blocks=kv_index_blocks)
        if fleet.index is not None:
            mirroring = follow_kv_events(bus, namespace, phase, chosen, fleet.index, rng=fleet.rng, following=following)
            mirror = await stack.enter_async_context(mirroring)
            if metrics is not None:
                metrics.register(KvMirrorMetrics(fleet.index, mirror))
        yield fleet
