"""Drafts are what followed the same last tokens before, and as many as are worth checking."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prompt_lookup import FIRST_CAPACITY, NGRAMS, PromptLookup, last_match

texts = st.lists(st.integers(0, 3), max_size=60)


def lookup(tokens: list[int], most: int = 4) -> PromptLookup:
    return PromptLookup(tokens, most)


def test_drafts_are_what_followed_the_same_tokens() -> None:
    assert list(lookup([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]).drafts(4)) == [4, 5, 6, 7]


def test_the_latest_of_several_places_counts() -> None:
    assert list(lookup([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3]).drafts(2)) == [5, 6]


def test_three_equal_tokens_are_better_than_two_that_came_later() -> None:
    assert list(lookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).drafts(1)) == [4]


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert list(lookup([8, 1, 2, 1, 2]).drafts(4)) == [1, 2, 1, 2]
    assert list(lookup([7, 7, 7]).drafts(4)) == [7, 7, 7, 7]


def test_a_text_without_repetition_has_none() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 3]):
        assert not lookup(tokens).drafts(4), tokens


def test_there_are_no_more_than_there_is_room_for() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3]
    assert [len(lookup(tokens).drafts(room)) for room in (-1, 0, 1, 3, 9)] == [0, 0, 1, 3, 4]


def test_wrong_drafts_make_the_next_ones_few_and_right_ones_more_again() -> None:
    drafter = lookup([1, 2] * 20, most=8)
    counts = []
    for accepted in (8, 2, 0, 1, 2, 4, 8):
        counts.append(len(drafter.drafts(8)))
        drafter.verified(counts[-1], accepted)
    assert counts == [8, 8, 2, 1, 2, 4, 8]


def test_a_text_that_grows_is_read_on() -> None:
    tokens: list[int] = []
    drafter = lookup(tokens, most=2)
    for i in range(3 * FIRST_CAPACITY):
        tokens.append(i % 100)
        drafts = drafter.drafts(2)
        assert list(drafts) == ([] if i < 101 else [(i + 1) % 100, (i + 2) % 100])


@given(texts, st.sampled_from(NGRAMS))
def test_matches_are_those_of_a_search_token_by_token(tokens: list[int], size: int) -> None:
    found = None
    for start in range(len(tokens) - size):
        if tokens[start : start + size] == tokens[len(tokens) - size :]:
            found = start + size
    assert last_match(np.array(tokens, np.int32), size) == found
