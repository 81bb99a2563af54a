"""Drafts are what followed the same last tokens before, and as many as are likely enough to be right."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prompt_lookup import FIRST_CAPACITY, FIRST_CHANCE, NGRAM, PromptLookup, latest_match

texts = st.lists(st.integers(0, 3), max_size=60)


def drafts(tokens: list[int], most: int = 4, least_chance: float = 0.0) -> list[int]:
    return list(PromptLookup(tokens, 4).drafts(most, least_chance))


def test_drafts_are_what_followed_the_same_tokens() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]


def test_the_latest_of_several_places_counts() -> None:
    assert drafts([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], 2) == [5, 6]


def test_three_equal_tokens_are_better_than_two_that_came_later() -> None:
    assert drafts([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1) == [4]
    assert drafts([2, 3, 4, 9, 3, 5, 2, 3], 1) == [4]


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert drafts([8, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert drafts([7, 7, 7]) == [7, 7, 7, 7]


def test_a_text_without_repetition_has_none() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]):
        assert not drafts(tokens), tokens


def test_there_are_no_more_than_there_is_room_for() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3]
    assert [len(drafts(tokens, room)) for room in (-1, 0, 1, 3, 9)] == [0, 0, 1, 3, 4]


def test_each_draft_is_likely_enough_with_all_before_it() -> None:
    tokens = [1, 2, 3] * 4
    for count in range(4):
        least = FIRST_CHANCE**count
        assert len(drafts(tokens, 4, least)) == count
        assert len(drafts(tokens, 4, least * 1.01)) == max(0, count - 1)


class Text:
    """A text of three parts that repeat, in which the next token is a surprise with a given chance."""

    def __init__(self, surprise: float, most: int) -> None:
        self.tokens = [1, 2, 3, 1, 2, 3]
        self.lookup = PromptLookup(self.tokens, most)
        self.surprise = surprise
        self.draw = random.Random(3)
        self.next = 1000

    def grow(self, steps: int, least_chance: float, most: int = 7) -> list[int]:
        """Drafts of each step. Right ones save steps, as in the engine."""
        counts = []
        for _ in range(steps):
            guessed = self.lookup.drafts(most, least_chance)
            counts.append(len(guessed))
            for token in [*guessed, None]:
                if self.draw.random() < self.surprise:
                    self.next += 1
                    self.tokens += [self.next, 1, 2, 3]
                    break
                self.tokens.append(self.tokens[-3])
                if token != self.tokens[-1]:
                    break
        return counts


@pytest.mark.parametrize(("surprise", "fewest", "most"), [(0.0, 7, 7), (0.1, 2, 4), (0.5, 0, 0.5)])
def test_the_number_of_drafts_follows_their_success(surprise: float, fewest: float, most: float) -> None:
    counts = Text(surprise, 7).grow(300, 0.4)[100:]
    assert fewest <= sum(counts) / len(counts) <= most


def test_success_is_learned_while_no_draft_is_worth_its_row() -> None:
    text = Text(0.0, 7)
    assert not any(text.grow(8, 0.9))
    assert max(text.grow(40, 0.9)) > 0
    assert text.grow(1, 0.9, most=0) == [0]
    assert text.grow(1, 0.9)[0] > 0


def test_a_text_that_grows_is_read_on() -> None:
    tokens: list[int] = []
    lookup = PromptLookup(tokens, 2)
    for i in range(3 * FIRST_CAPACITY):
        tokens.append(i % 100)
        guessed = lookup.drafts(2, 0.0)
        assert list(guessed) == ([] if i < 100 else [(i + 1) % 100, (i + 2) % 100])


@given(texts)
def test_matches_are_those_of_a_search_token_by_token(tokens: list[int]) -> None:
    found = 0, 0
    for size in range(1, NGRAM + 1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                found = start + size, size
    assert latest_match(np.array(tokens, np.int32)) == found
