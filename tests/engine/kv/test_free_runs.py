from hypothesis import given
from hypothesis import strategies as st

from engine.kv.page_pool import FreeRuns


def runs_of(pages: list[int]) -> int:
    return sum(1 for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1)


def test_pages_taken_together_are_neighbours() -> None:
    assert FreeRuns(10).take(4) == [0, 1, 2, 3]


def test_growing_takes_the_page_behind_the_last_one() -> None:
    runs = FreeRuns(10)
    runs.give({1, 5}.intersection(runs.take(10)))
    assert runs.take(1, after=4) == [5]


def test_the_smallest_run_that_fits_is_taken_so_that_large_ones_stay_whole() -> None:
    runs = FreeRuns(20)
    runs.give({2, 3, 4, 10, 11, 12, 13, 14}.intersection(runs.take(20)))
    assert runs.take(3) == [2, 3, 4]
    assert runs.take(5) == [10, 11, 12, 13, 14]


def test_without_a_run_that_fits_the_largest_ones_are_joined() -> None:
    runs = FreeRuns(20)
    runs.give({1, 5, 6, 7, 10, 11}.intersection(runs.take(20)))
    assert runs.take(5) == [5, 6, 7, 10, 11]


def test_a_page_given_back_joins_its_neighbours_on_both_sides() -> None:
    runs = FreeRuns(6)
    pages = runs.take(6)
    runs.give(page for page in pages if page != 3)
    runs.give([3])
    assert runs.take(6) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=60))
def test_taken_and_free_pages_are_always_each_page_once(moves: list[tuple[int, int]]) -> None:
    runs = FreeRuns(24)
    taken: list[int] = []
    for count, choice in moves:
        if count <= len(runs) and choice % 2:
            taken += runs.take(count, after=taken[-1] if taken else None)
        else:
            runs.give([taken.pop(choice % len(taken)) for _ in range(min(count, len(taken)))])
        assert sorted([*taken, *runs.pages()]) == list(range(24))
        assert len(runs) == 24 - len(taken)
        assert runs_of(runs.pages()) == len(runs._length) == len(runs._first)
        assert sorted(runs._length.values())[-1:] == ([runs.longest] if len(runs) else [])
        assert runs._lengths == sorted(set(runs._length.values()))
        assert {first: length for length, firsts in runs._of_length.items() for first in firsts} == runs._length
