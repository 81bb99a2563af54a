"""Caches, numbered batches on a bad network, and a router's index, compared with plain sets."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from components.messaging.kv_publisher import EventLog
from components.routing.kv_following import MAX_HELD, MAX_HELD_BLOCKS, KvFollower
from components.routing.kv_index import KvIndex
from components.wire.kv_events import KvEventBatch, pack_batch, unpack_batch, unpack_hashes

BLOCKS = [bytes([n]) * 16 for n in range(12)]
NAMES = ["a", "b"]
MAX_WAITING = 4
MAX_BATCH = 2

names = st.sampled_from(NAMES)
changes = st.lists(st.tuples(st.sampled_from(BLOCKS), st.booleans()), max_size=8)


@dataclass(slots=True)
class Cache:
    """A worker's cache, now and after each batch."""

    name: str
    log: EventLog = field(default_factory=lambda: EventLog(MAX_WAITING, MAX_BATCH))
    epoch: int = 0
    blocks: set[bytes] = field(default_factory=set)
    at: dict[int, frozenset[bytes]] = field(default_factory=dict)
    wire: list[bytes] = field(default_factory=list)  # batches on their way

    def change(self, some: list[tuple[bytes, bool]]) -> None:
        dropped = self.log.dropped
        for block, is_stored in some:
            (self.blocks.add if is_stored else self.blocks.discard)(block)
        self.log.record(some)
        if self.log.dropped > dropped:
            self.at[self.log.number] = frozenset(self.blocks)

    def seal(self) -> None:
        self.send(self.log.take_batches(self.name, str(self.epoch)))

    def send(self, batches: list[KvEventBatch]) -> None:
        state = set(self.at[batches[0].number - 1]) if batches else self.blocks
        for batch in batches:
            assert len(batch.stored) + len(batch.removed) <= MAX_BATCH
            state = (state | set(batch.stored)) - set(batch.removed)
            self.at[batch.number] = frozenset(state)
        assert state == self.blocks, "batches say all that has changed"
        self.wire += map(pack_batch, batches)


class FollowingMachine(RuleBasedStateMachine):
    """One router follows two workers."""

    max_blocks = 1000

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex(self.max_blocks)
        self.caches = {name: Cache(name) for name in NAMES}
        self.followers = {name: KvFollower(name, "0", self.index) for name in NAMES}
        self.dumps: dict[str, tuple[int, list[bytes]]] = {}  # on their way: the number, and missing parts
        for cache in self.caches.values():
            cache.at[0] = frozenset()

    @rule(name=names, some=changes)
    def change(self, name: str, some: list[tuple[bytes, bool]]) -> None:
        self.caches[name].change(some)

    @rule(name=names)
    def seal(self, name: str) -> None:
        self.caches[name].seal()

    @rule(name=names, at=st.integers(0, 9))
    def arrive(self, name: str, at: int) -> None:
        """Deliver any batch, not only the first."""
        wire = self.caches[name].wire
        if wire:
            self._receive(name, wire.pop(at % len(wire) if at > 6 else 0))

    @rule(name=names, at=st.integers(0, 9))
    def arrive_and_stay(self, name: str, at: int) -> None:
        wire = self.caches[name].wire
        if wire:
            self._receive(name, wire[at % len(wire)])

    @rule(name=names, at=st.integers(0, 9))
    def lose(self, name: str, at: int) -> None:
        wire = self.caches[name].wire
        if wire:
            del wire[at % len(wire)]

    @rule(name=names)
    def register_anew(self, name: str) -> None:
        """Its cache is unchanged, but messages on their way have the old epoch."""
        cache = self.caches[name]
        cache.epoch += 1
        self.followers[name].forget()
        self.followers[name] = KvFollower(name, str(cache.epoch), self.index)
        self.dumps.pop(name, None)
        assert not self.index.blocks_of(name)

    @rule(name=names)
    def restart(self, name: str) -> None:
        """Start a process under the same name, with an empty cache."""
        epoch = self.caches[name].epoch
        wire = self.caches[name].wire
        self.caches[name] = Cache(name, epoch=epoch, wire=wire, at={0: frozenset()})
        self.register_anew(name)

    @rule(name=names)
    def mark_stale(self, name: str) -> None:
        self.followers[name].mark_stale()

    @rule(name=names)
    def ask(self, name: str) -> None:
        cache, follower = self.caches[name], self.followers[name]
        if not follower.needs_dump or name in self.dumps:
            return
        cache.seal()
        have = follower.dump_asked()
        if have == cache.log.number:
            follower.dump_ends(have)
            return
        follower.dump_begins()
        self.dumps[name] = (cache.log.number, unpack_hashes(cache.log.dump()))

    @rule(name=names, count=st.integers(0, 4))
    def dump_part(self, name: str, count: int) -> None:
        if name not in self.dumps:
            return
        number, left = self.dumps[name]
        self.followers[name].dump_part(left[:count])
        self.dumps[name] = (number, left[count:])
        if not left[count:]:
            del self.dumps[name]
            self.followers[name].dump_ends(number)

    @precondition(lambda self: self.dumps)
    @rule(name=names)
    def dump_fails(self, name: str) -> None:
        if self.dumps.pop(name, None):
            self.followers[name].forget()
            assert not self.index.blocks_of(name)

    @invariant()
    def what_is_followed_is_exact(self) -> None:
        for name, follower in self.followers.items():
            if follower.number is not None:
                held, known = self.caches[name].at[follower.number], self.index.blocks_of(name)
                assert known <= held
                assert len(held - known) <= follower.missing

    def teardown(self) -> None:
        """After all messages, a heartbeat and the necessary dumps, the index is complete."""
        for name, cache in self.caches.items():
            self.dump_part(name, len(BLOCKS))
            cache.seal()
            while cache.wire:
                self.arrive(name, 0)
            self._receive(name, pack_batch(cache.log.empty_batch(name, str(cache.epoch))))
            for _ in range(2):
                self.ask(name)
                self.dump_part(name, len(BLOCKS))
            assert not self.followers[name].needs_dump
            assert self.followers[name].missing or self.index.blocks_of(name) == cache.blocks
        if self.max_blocks >= len(BLOCKS):
            assert not any(follower.missing for follower in self.followers.values())

    def _receive(self, name: str, data: bytes) -> None:
        batch = unpack_batch(data)
        if batch.epoch == self.followers[name].epoch:
            self.followers[name].received(batch)


class FollowingWithoutRoom(FollowingMachine):
    """An index that cannot hold them all."""

    max_blocks = 5


TestFollowing = FollowingMachine.TestCase
TestFollowing.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFollowingWithoutRoom = FollowingWithoutRoom.TestCase
TestFollowingWithoutRoom.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


def test_a_block_that_comes_and_goes_between_two_batches_is_not_mentioned() -> None:
    log = EventLog()
    one, two = BLOCKS[:2]
    log.record([(one, True), (two, True), (one, False), (one, False)])
    assert log.take_batches("a", "0") == [KvEventBatch("a", "0", 1, [two], [])]
    log.record([(two, False), (two, True)])
    assert (len(log), log.take_batches("a", "0"), log.number) == (0, [], 1)


def test_too_much_that_waits_is_dropped_with_its_number() -> None:
    log = EventLog(max_waiting=3)
    log.record((block, True) for block in BLOCKS[:4])
    assert (len(log), log.number, log.dropped) == (0, 1, 1)
    assert log.empty_batch("a", "0").number == 2
    assert unpack_hashes(log.dump()) == BLOCKS[:4], "in the order they came"


def test_batches_held_for_too_long_are_given_up_and_a_dump_is_needed_again() -> None:
    index = KvIndex()
    follower = KvFollower("a", "0", index)
    for number in range(1, MAX_HELD + 3):
        follower.received(KvEventBatch("a", "0", number, [BLOCKS[0]], []))
    assert len(follower._held) <= MAX_HELD
    for number in range(4):
        follower.received(KvEventBatch("a", "0", MAX_HELD + number, [bytes(16)] * (MAX_HELD_BLOCKS // 2), []))
    assert sum(len(batch.stored) for batch in follower._held.values()) <= MAX_HELD_BLOCKS
    follower.dump_begins()
    follower.dump_ends(1)
    assert follower.needs_dump
    follower.dump_begins()
    follower.dump_ends(MAX_HELD + 3)
    assert not follower.needs_dump


def test_a_doubt_that_comes_while_a_dump_is_fetched_is_not_forgotten() -> None:
    follower = KvFollower("a", "0", KvIndex())
    assert follower.dump_asked() is None
    follower.dump_begins()
    follower.mark_stale()
    follower.dump_ends(7)
    assert follower.needs_dump
    assert follower.dump_asked() == 7
    follower.dump_ends(7)
    assert not follower.needs_dump


def test_what_found_no_room_is_missing_until_a_whole_dump_is_taken_in() -> None:
    index = KvIndex(max_blocks=3)
    index.add("other", BLOCKS[8:10])
    follower = KvFollower("a", "0", index)
    follower.dump_begins()
    follower.dump_part(BLOCKS[:2])
    follower.dump_ends(1)
    follower.received(KvEventBatch("a", "0", 2, BLOCKS[2:3], []))
    assert (follower.missing, follower.needs_dump) == (2, False)
    index.discard("other", BLOCKS[8:10])
    follower.mark_stale()
    assert follower.dump_asked() is None, "that nothing has changed there is no answer"
    follower.dump_begins()
    follower.dump_part(BLOCKS[:3])
    follower.dump_ends(2)
    assert (follower.missing, follower.needs_dump) == (0, False)
    assert index.blocks_of("a") == set(BLOCKS[:3])
