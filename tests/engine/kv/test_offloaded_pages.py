"""Evicted pages beside the pool: every block that the cache names is where it says, with its contents."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import PageLeak
from engine.kv.offloaded_pages import OffloadedPages
from engine.kv.page_pool import PagePool, PrefixCache

POOL = 6


class Memory:
    """Pages of a pool, and what each page holds: here the name of its block."""

    def __init__(self, num_offloaded: int) -> None:
        self.holds: dict[int, bytes] = {}
        self.copied: list[tuple[int, int]] = []
        self.prefix = PrefixCache(records_events=True)
        self.offloaded = OffloadedPages(
            POOL, num_offloaded, rename=self.prefix.move, forget=self.prefix.forget, copy_pages=self.copy
        )
        self.pool = PagePool(POOL, self.prefix, self.offloaded)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self.holds[target] = self.holds[source]
        self.copied += moves

    def compute(self, *blocks: bytes) -> list[int]:
        """Allocate, write and publish pages; they stay held."""
        pages = self.pool.allocate(len(blocks))
        self.holds |= dict(zip(pages, blocks, strict=True))
        self.pool.publish(blocks, pages)
        return pages

    def compute_and_release(self, *blocks: bytes) -> None:
        self.pool.release(self.compute(*blocks))

    def events(self) -> list[tuple[bytes, bool]]:
        return self.prefix.take_events()

    def check(self) -> None:
        self.pool.check()
        for block, page in self.prefix._page_of.items():
            assert self.holds[page] == block


def test_evicted_pages_move_beside_the_pool_and_come_back_with_what_they_held() -> None:
    memory = Memory(4)
    memory.compute_and_release(b"a", b"b", b"c")
    others = memory.compute(b"1", b"2", b"3", b"4", b"5")
    found = memory.prefix.match([b"a", b"b", b"c", b"d"])
    assert [page >= POOL for page in found] == [False, True, True]
    memory.check()
    memory.pool.release(others)
    held = memory.pool.hold(found)
    assert [memory.holds[page] for page in held] == [b"a", b"b", b"c"]
    assert max(held) < POOL
    assert memory.prefix.match([b"a", b"b", b"c"]) == held
    assert memory.offloaded.num_restored == 2
    memory.check()


def test_neither_moving_out_nor_coming_back_is_an_event() -> None:
    memory = Memory(6)
    memory.compute_and_release(b"a", b"b")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    memory.events()
    memory.pool.release(memory.pool.hold(memory.prefix.match([b"a", b"b"])))
    assert len(memory.offloaded) == 2
    assert memory.events() == []
    memory.check()


def test_without_room_the_page_that_came_first_is_forgotten() -> None:
    memory = Memory(2)
    memory.compute_and_release(b"a", b"b")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    assert len(memory.offloaded) == 2
    memory.events()
    memory.compute(b"x")
    assert memory.events() == [(b"b", False), (b"x", True)]
    assert memory.prefix.page_of(b"a") is not None
    assert memory.prefix.page_of(b"6") is not None
    memory.check()


def test_of_more_evicted_pages_than_there_is_room_for_only_the_last_are_copied() -> None:
    memory = Memory(2)
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    memory.compute(b"a", b"b", b"c", b"d", b"e")
    assert len(memory.copied) == 2
    assert len(memory.prefix.match([b"1", b"2", b"3"])) == 3
    assert memory.prefix.page_of(b"4") is None
    memory.check()


def test_pages_that_come_back_are_not_given_away_to_those_evicted_for_them() -> None:
    """The pool is full of cached pages, and so is the room beside it: each page that comes back evicts another."""
    memory = Memory(3)
    memory.compute_and_release(b"a", b"b", b"c")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    held = memory.pool.hold(memory.prefix.match([b"a", b"b", b"c"]))
    assert [memory.holds[page] for page in held] == [b"a", b"b", b"c"]
    memory.check()


def test_pool_and_room_together_hold_nearly_as_much_as_they_have_pages() -> None:
    """Pages that came back gave up their places too late: as many others were forgotten, half of all."""
    num_pages, num_offloaded, length = 101, 200, 100
    prefix = PrefixCache()
    offloaded = OffloadedPages(
        num_pages, num_offloaded, rename=prefix.move, forget=prefix.forget, copy_pages=lambda moves: None
    )
    pool = PagePool(num_pages, prefix, offloaded)
    texts = [[b"%d %d" % (text, i) for i in range(length)] for text in range(3)]
    hits = 0
    for turn in range(12):
        for blocks in texts:
            held = pool.hold(prefix.match(blocks))
            hits += len(held) if turn > 1 else 0
            held += pool.allocate(length - len(held))
            pool.publish(blocks, held)
            pool.release(held)
            pool.check()
    assert hits > 0.85 * 10 * 3 * length


def test_a_page_that_was_computed_again_takes_the_name_of_the_one_beside_the_pool() -> None:
    """Prompts with log-probabilities are computed whole. Their pages were thrown away, and copied back later."""
    memory = Memory(6)
    memory.compute_and_release(b"a", b"b")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    memory.events()
    again = memory.compute(b"a", b"b")
    assert memory.prefix.match([b"a", b"b"]) == again
    assert (b"a", True) not in memory.events()
    memory.check()


def test_pages_for_single_ones_are_evicted_together() -> None:
    """Each decode that needed a page had a copy of its own."""
    copies: list[int] = []
    prefix = PrefixCache()
    offloaded = OffloadedPages(
        320, 640, rename=prefix.move, forget=prefix.forget, copy_pages=lambda moves: copies.append(len(moves))
    )
    pool = PagePool(320, prefix, offloaded)
    pages = pool.allocate(320)
    pool.publish([b"%d" % page for page in pages], pages)
    pool.release(pages)
    for _ in range(40):
        pool.allocate(1)
    assert copies == [20, 20]
    pool.check()


def test_cached_pages_of_the_same_prefix_are_not_evicted_for_it() -> None:
    memory = Memory(6)
    memory.compute_and_release(b"b", b"c")
    memory.compute_and_release(b"a", b"1", b"2", b"3", b"4", b"5")
    assert memory.prefix.match([b"a"])[0] < POOL <= min(memory.prefix.match([b"b", b"c"]))
    held = memory.pool.hold(memory.prefix.match([b"a", b"b", b"c"]))
    assert [memory.holds[page] for page in held] == [b"a", b"b", b"c"]
    assert (memory.pool.num_held, len(memory.offloaded)) == (3, 2)
    memory.check()


def test_a_forgotten_block_gives_up_its_place() -> None:
    memory = Memory(3)
    memory.compute_and_release(b"a")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    memory.pool.forget(b"a")
    assert memory.prefix.match([b"a"]) == []
    assert len(memory.offloaded) == 0
    memory.check()


def test_the_check_sees_places_that_are_lost_or_without_a_name() -> None:
    memory = Memory(2)
    memory.compute_and_release(b"a")
    memory.compute_and_release(b"1", b"2", b"3", b"4", b"5", b"6")
    place = memory.prefix.match([b"a"])[0]
    memory.prefix.forget(place)
    with pytest.raises(PageLeak, match="without a name"):
        memory.pool.check()
    memory.offloaded.drop(place)
    memory.check()
    memory.offloaded._free.pop()
    with pytest.raises(PageLeak, match="offloaded pages once"):
        memory.pool.check()


BLOCKS = [b"%d" % number for number in range(12)]
Act = st.tuples(st.sampled_from(["take", "find", "release", "forget"]), st.integers(0, 11), st.integers(1, POOL))


@given(num_offloaded=st.integers(1, 8), acts=st.lists(Act, max_size=40))
def test_whatever_happens_each_named_block_is_where_the_cache_says(
    num_offloaded: int, acts: list[tuple[str, int, int]]
) -> None:
    memory = Memory(num_offloaded)
    live: list[list[int]] = []
    known: set[bytes] = set()
    for act, first, count in acts:
        blocks = (BLOCKS + BLOCKS)[first : first + count]
        match act:
            case "take" if memory.pool.num_available >= count:
                live.append(memory.compute(*blocks))
            case "find":
                found = memory.prefix.match(blocks)
                needed = memory.pool.num_cached_among(found) + memory.pool.num_offloaded_among(found)
                if found and needed <= memory.pool.num_available:
                    live.append(memory.pool.hold(found))
                    assert [memory.holds[page] for page in live[-1]] == blocks[: len(found)]
            case "release" if live:
                memory.pool.release(live.pop(first % len(live)))
            case "forget":
                memory.pool.forget(BLOCKS[first])
        memory.check()
        for block, is_stored in memory.events():
            assert (block not in known) == is_stored
            (known.add if is_stored else known.discard)(block)
        assert known == set(memory.prefix._page_of)
