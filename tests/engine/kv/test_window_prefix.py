"""Prefixes of which only the last blocks are cached, as requests leave them behind a window."""

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.page_pool import PrefixCache

NAMES = [bytes([i]) for i in range(12)]


def test_the_last_blocks_of_a_prefix_are_enough() -> None:
    prefix = PrefixCache()
    prefix.insert([b"c", b"d", b"f"], [7, 3, 5])
    asked = [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert prefix.match_last(asked, 2) == (2, [7, 3])
    assert prefix.match_last(asked, 1) == (5, [5])
    assert prefix.match_last(asked, 3) == (0, [])


def test_a_short_prefix_is_matched_whole() -> None:
    prefix = PrefixCache()
    prefix.insert([b"a", b"b"], [7, 3])
    assert prefix.match_last([b"a", b"b", b"c"], 5) == (0, [7, 3])
    assert prefix.match_last([b"x", b"b"], 5) == (0, [])
    assert prefix.match_last([], 5) == (0, [])


@given(known=st.sets(st.sampled_from(NAMES)), count=st.integers(1, 5))
def test_it_is_the_longest_prefix_whose_last_blocks_are_known(known: set[bytes], count: int) -> None:
    prefix = PrefixCache()
    prefix.insert(sorted(known), range(len(known)))
    first, pages = prefix.match_last(NAMES, count)
    fitting = [n for n in range(len(NAMES) + 1) if set(NAMES[max(0, n - count) : n]) <= known]
    assert first + len(pages) == max(fitting)
    assert pages == prefix.match(NAMES[first : max(fitting)])
    assert len(pages) == min(count, max(fitting))
