import random
from itertools import pairwise

import pytest

from components.errors import PageLeak
from engine.kv.page_pool import PagePool, PrefixCache


def make_pool(num_pages: int = 6) -> tuple[PagePool, PrefixCache]:
    prefix = PrefixCache()
    return PagePool(num_pages, prefix), prefix


def places(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_cached, pool.num_held


def test_released_pages_are_free_when_nobody_can_find_them() -> None:
    pool, _ = make_pool()
    pages = pool.allocate(4)
    assert places(pool) == (2, 0, 4)
    pool.release(pages)
    assert places(pool) == (6, 0, 0)


def test_released_pages_with_a_name_stay_cached() -> None:
    pool, prefix = make_pool()
    pages = pool.allocate(3)
    prefix.insert([b"a", b"b"], pages[:2])
    pool.release(pages)
    assert places(pool) == (4, 2, 0)
    assert prefix.match([b"a", b"b", b"c"]) == pages[:2]


def test_a_shared_page_is_held_until_the_last_holder_lets_go() -> None:
    pool, prefix = make_pool()
    pages = pool.allocate(1)
    prefix.insert([b"a"], pages)
    pool.share(pages)
    pool.release(pages)
    assert places(pool) == (5, 0, 1)
    pool.release(pages)
    assert places(pool) == (5, 1, 0)
    pool.share(pages)
    assert places(pool) == (5, 0, 1)


def test_cached_pages_are_evicted_only_as_far_as_needed_and_oldest_first() -> None:
    pool, prefix = make_pool()
    old, new = pool.allocate(2), pool.allocate(2)
    prefix.insert([b"o1", b"o2"], old)
    prefix.insert([b"n1", b"n2"], new)
    pool.release(old)
    pool.release(new)
    pool.allocate(3)
    assert places(pool) == (0, 3, 3)
    assert prefix.match([b"o1", b"o2"]) == old[:1], "a chain is evicted from its end"
    assert prefix.match([b"n1", b"n2"]) == new


def neighbours(pages: list[int]) -> int:
    return sum(1 for page, after in pairwise(pages) if after == page + 1)


def test_a_full_pool_still_gives_neighbours() -> None:
    pool, prefix = make_pool(2048)
    draw, live = random.Random(1), list[list[int]]()
    joined = wanted = 0
    for number in range(3000):
        pages = pool.allocate(draw.randrange(3, 30))
        if number > 1000:
            joined, wanted = joined + neighbours(pages), wanted + len(pages) - 1
        live.append(pages)
        for grows in live:
            grows.extend(pool.allocate(1, after=grows[-1]))
        if len(live) > 8:
            over = live.pop(draw.randrange(len(live)))
            prefix.insert([b"%d %d" % (number, index) for index in range(len(over) - 1)], over[:-1])
            pool.release(over)
    pool.check()
    assert joined > 0.9 * wanted
    assert pool.num_cached > 0.9 * pool.num_available


def test_for_neighbours_a_sixteenth_of_what_nobody_holds_is_evicted_at_most() -> None:
    pool, prefix = make_pool(96)
    apart = [pool.allocate(1) for _ in range(96)]
    for number, page in enumerate(apart[::2] + apart[1::2]):
        prefix.insert([b"%d" % number], page)
        pool.release(page)
    pool.allocate(8)  # no two of those that are evicted first lie together
    assert places(pool) == (6, 96 - 8 - 6, 8)


def test_sharing_a_page_makes_it_young_again() -> None:
    pool, prefix = make_pool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    prefix.insert([b"1"], first)
    prefix.insert([b"2"], second)
    pool.release(first)
    pool.release(second)
    pool.share(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_releasing_twice_is_a_leak_and_not_silent() -> None:
    pool, _ = make_pool()
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(PageLeak, match="no request holds it"):
        pool.release(pages)


def test_check_sees_a_page_that_is_nowhere() -> None:
    pool, _ = make_pool()
    pool.allocate(1)
    pool._holders[0] = 0
    with pytest.raises(PageLeak, match="5 free"):
        pool.check()


def test_check_sees_a_page_in_two_places() -> None:
    pool, _ = make_pool()
    pool._holders[3] = 1
    with pytest.raises(PageLeak):
        pool.check()


def test_check_sees_a_cached_page_without_a_name() -> None:
    pool, prefix = make_pool()
    pages = pool.allocate(1)
    prefix.insert([b"a"], pages)
    pool.release(pages)
    prefix.forget(pages[0])
    with pytest.raises(PageLeak, match="without a name"):
        pool.check()
