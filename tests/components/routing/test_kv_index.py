"""The index gives the same answers as a set of blocks for each instance."""

import random
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from components.routing import kv_index
from components.routing.kv_index import KvIndex
from components.wire.tokens import block_hashes, seed_hash

SEED = seed_hash("m")


def chain(*pages: int) -> list[bytes]:
    """Block hashes of a prompt whose pages are all of one token each."""
    return block_hashes([page for page in pages for _ in range(16)], 16, SEED)


def brute_force(held: dict[str, set[bytes]], prompt: Sequence[bytes]) -> dict[str, int]:
    counts = {
        name: next((n for n, block in enumerate(prompt) if block not in blocks), len(prompt))
        for name, blocks in held.items()
    }
    return {name: count for name, count in counts.items() if count}


PROMPTS = [chain(*pages) for pages in [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4, 5), (1, 9), (1, 9, 2), (7,), (7, 7, 7)]]
INSTANCES = ["a", "b", "c", "d"]
prompts = st.sampled_from(PROMPTS)
instances = st.sampled_from(INSTANCES)


class IndexMachine(RuleBasedStateMachine):
    """Blocks and instances come and go, so slots are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.held: dict[str, set[bytes]] = {}

    @rule(name=instances, prompt=prompts, start=st.integers(0, 2))
    def add(self, name: str, prompt: list[bytes], start: int) -> None:
        """The block before it may have been evicted."""
        self.index.add(name, prompt[start:])
        self.held.setdefault(name, set()).update(prompt[start:])

    @rule(name=instances, prompt=prompts, start=st.integers(0, 3))
    def discard(self, name: str, prompt: list[bytes], start: int) -> None:
        self.index.discard(name, prompt[start:])
        self.held.get(name, set()).difference_update(prompt[start:])

    @rule(name=instances)
    def remove(self, name: str) -> None:
        self.index.remove(name)
        self.held.pop(name, None)
        assert name not in self.index

    @rule()
    def sweep(self) -> None:
        assert self.index.sweep(400) == bool(self.index._left)

    @invariant()
    def it_finds_what_is_held(self) -> None:
        for prompt in PROMPTS:
            assert self.index.find(prompt) == brute_force(self.held, prompt)
        for name in INSTANCES:
            assert self.index.blocks_of(name) == self.held.get(name, set())

    @invariant()
    def nothing_is_kept_that_nobody_holds(self) -> None:
        held = set().union(*self.held.values())
        assert self.index.num_blocks == sum(map(len, self.index._shards))
        if self.index._left:
            assert self.index.num_blocks >= len(held)
        else:
            assert self.index.num_blocks == len(held)
        assert len(self.index._ids) <= len(INSTANCES) * 8, "slots are used again"

    def teardown(self) -> None:
        for name in INSTANCES:
            self.index.remove(name)
        for _ in range(2):
            self.index._sweep(10_000)
        assert self.index.num_blocks == 0
        assert self.index._written == self.index._left == 0
        assert sorted(self.index._free) == list(range(len(self.index._ids)))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_an_empty_prompt_is_cached_nowhere() -> None:
    index = KvIndex()
    index.add("a", PROMPTS[0])
    assert index.find([]) == {}
    assert index.find(chain(99)) == {}


def test_a_block_too_many_is_refused_and_there_is_room_when_others_have_gone() -> None:
    index = KvIndex(max_blocks=3)
    long = PROMPTS[3]
    assert index.add("a", long) == 2
    assert (index.num_blocks, index.refused, index.has_room) == (3, 2, False)
    assert index.find(long) == {"a": 3}, "the beginning is what is kept"
    index.add("b", long[:2])
    assert index.find(long) == {"a": 3, "b": 2}, "a second holder of a block costs no block"
    index.discard("a", long)
    assert (index.num_blocks, index.has_room) == (2, True)
    index.add("c", chain(7))
    assert index.find(chain(7)) == {"c": 1}


def test_what_the_gone_held_makes_room_when_it_is_swept_out() -> None:
    index = KvIndex(max_blocks=1000)
    draw = random.Random(1)
    index.add("a", [draw.randbytes(16) for _ in range(1000)])
    index.remove("a")
    for _ in range(3):
        index.add("b", [draw.randbytes(16) for _ in range(400)])
    assert index.refused < 800
    assert len(index.blocks_of("b")) == index.num_blocks > 400


def test_masks_are_shared_and_their_number_is_bounded() -> None:
    index = KvIndex()
    for name in INSTANCES:
        index.add(name, PROMPTS[3])
    masks = {id(index._shards[block[0]][block]) for block in PROMPTS[3]}
    assert len(masks) == 1
    for n in range(kv_index.INTERNED + 10):
        index._shared(1 << 40 | n)
    assert len(index._masks) <= kv_index.INTERNED
    assert index.find(PROMPTS[3]) == dict.fromkeys(INSTANCES, 5)
