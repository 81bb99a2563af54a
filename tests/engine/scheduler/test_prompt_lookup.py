"""Drafts are the tokens that followed the same tokens before, as many as are likely enough."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prompt_lookup import (
    FIRST_CAPACITY,
    FIRST_CHANCE,
    NGRAM,
    PREDICTED_CHANCE,
    PromptLookup,
    latest_match,
    next_match,
)

texts = st.lists(st.integers(0, 3), max_size=60)


def drafts(tokens: list[int], most: int = 4, least_chance: float = 0.0) -> list[int]:
    return list(PromptLookup(4, tokens).drafts(most, least_chance))


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
    """A text of three repeating parts, with random tokens of a given probability."""

    def __init__(self, surprise: float, most: int) -> None:
        self.tokens = [1, 2, 3, 1, 2, 3]
        self.lookup = PromptLookup(most, self.tokens)
        self.surprise = surprise
        self.draw = random.Random(3)
        self.next = 1000

    def grow(self, steps: int, least_chance: float, most: int = 7) -> list[int]:
        """Return the drafts of each step. Right ones save steps, like in the engine."""
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
    lookup = PromptLookup(2, tokens)
    for i in range(3 * FIRST_CAPACITY):
        tokens.append(i % 100)
        guessed = lookup.drafts(2, 0.0)
        assert list(guessed) == ([] if i < 100 else [(i + 1) % 100, (i + 2) % 100])


def longest_ends(within: list[int], text: list[int]) -> tuple[list[int], int]:
    """Indices behind the last tokens of `text` in `within`, for as many of them as possible."""
    for size in range(min(NGRAM, len(text)), 0, -1):
        ends = [end for end in range(size, len(within) + 1) if within[end - size : end] == text[len(text) - size :]]
        if ends:
            return ends, size
    return [], 0


@given(texts, texts, st.integers(0, 60))
def test_a_place_in_the_prediction_is_the_next_with_most_equal_tokens(
    prediction: list[int], text: list[int], start: int
) -> None:
    ends, size = longest_ends(prediction, text)
    expected = (next((end for end in ends if end > start), ends[0]), size) if ends else (0, 0)
    assert next_match(np.array(prediction, np.int32), np.array(text, np.int32), start) == expected


def answered(prediction: list[int], answer: list[int], prompt: list[int], least_chance: float = 0.1) -> int:
    """Return how many steps an answer takes, after its first token."""
    tokens, steps = [*prompt, answer[0]], 0
    lookup = PromptLookup(7, tokens, prediction)
    while len(tokens) < len(prompt) + len(answer):
        steps += 1
        rest = answer[len(tokens) - len(prompt) :]
        for guessed, token in zip([*lookup.drafts(7, least_chance), None], rest, strict=False):
            tokens.append(token)
            if guessed != token:
                break
    return steps


PROMPT = list(range(100, 140))
FILE = list(range(200, 296))


def test_a_predicted_answer_takes_an_eighth_of_the_steps() -> None:
    assert answered(FILE, FILE, PROMPT) == 12
    assert answered([], FILE, PROMPT) == len(FILE) - 1


@pytest.mark.parametrize(
    "answer",
    [
        [*FILE[:40], 1, *FILE[41:]],  # a changed token
        [*FILE[:40], *FILE[50:]],  # some are missing
        [*FILE[:40], 1, 2, 3, *FILE[40:]],  # some are new
        [1, 2, 3, *FILE],
        [*FILE[48:], *FILE[:48]],  # the halves change places
    ],
)
def test_a_changed_answer_takes_few_steps_more(answer: list[int]) -> None:
    assert answered(FILE, answer, PROMPT) <= 20


def test_a_replaced_token_takes_one_step() -> None:
    answer = [*FILE[:40], 1, *FILE[41:56], 2, *FILE[57:]]
    assert answered(FILE, answer, PROMPT) <= answered(FILE, FILE, PROMPT) + 2


def test_a_place_behind_the_last_one_is_more_likely() -> None:
    """Each line of the prediction begins with the same three tokens."""
    lines = [[7, 8, 9, 300 + i] for i in range(20)]
    prediction = [token for line in lines for token in line]
    assert answered(prediction, prediction, PROMPT) == 10
    renamed = [token for line in lines for token in [*line[:3], line[3] + (line[3] % 5 == 0)]]
    assert answered(prediction, renamed, PROMPT) <= 20


def test_a_wrong_prediction_is_given_up() -> None:
    """The first token of each draft is wrong, so its estimated chance sinks."""
    tokens = [*PROMPT, 1]
    lookup = PromptLookup(7, tokens, [1, 2] * 30)
    counts = []
    for i in range(30):
        counts.append(len(lookup.drafts(7, 0.4)))
        tokens += [1000 + i, 1]
    assert counts[0] == 4
    assert not any(counts[10:])


def test_the_source_that_was_right_more_often_counts() -> None:
    assert PREDICTED_CHANCE > FIRST_CHANCE
    tokens = [1, 2, 3, 4, 5, 1, 2, 3]
    assert list(PromptLookup(2, tokens, [1, 2, 3, 6, 7, 8]).drafts(2, 0.1)) == [6, 7]
    assert list(PromptLookup(2, tokens, [9, 9]).drafts(2, 0.05)) == [4, 5]


@given(texts)
def test_matches_are_those_of_a_search_token_by_token(tokens: list[int]) -> None:
    found = 0, 0
    for size in range(1, NGRAM + 1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                found = start + size, size
    assert latest_match(np.array(tokens, np.int32)) == found
