"""Noise of tokens is random, and equal everywhere."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.wire.sampling import SamplingParams
from engine.sampling import noise
from engine.sampling.drawing import candidates, draw, drawing_of
from engine.sampling.noise import (
    CHUNK,
    gumbel,
    keys,
    noise_words,
    stream_starts,
    tokens_of_words,
    total_weight,
    weights,
)
from tests.engine.sampling.reference import noise_word

CHI_SQUARE_99 = 161  # of 99 degrees of freedom: 99.99 % are below


def key_of(seed: int, position: int) -> int:
    return int(keys(stream_starts([seed]), [position])[0])


def chi_square_of_pairs(left: np.ndarray, right: np.ndarray) -> float:
    """Return chi-square of pairs of independent words, in 10 by 10 cells."""
    cells = np.bincount((left * 10.0 / 2**32).astype(int) * 10 + (right * 10.0 / 2**32).astype(int), minlength=100)
    wanted = len(left) / 100
    return float(((cells - wanted) ** 2 / wanted).sum())


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_noise_depends_on_seed_position_and_token_alone(seed: int, position: int, token: int) -> None:
    """Equal to Python integers, alone and among others."""
    key = key_of(seed, position)
    assert int(keys(stream_starts([9, seed, -1]), [position + 1, position, 3])[1]) == key
    word = int(noise_words(key, np.array([token]))[0])
    assert word == noise_word(seed, position, token)
    assert word == int(noise_words(key, np.array([5, token, 7]))[1])


@pytest.mark.parametrize("most", [0, 1 << 18, 1 << 24, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("vocab", [1, 255, 256, 2 * CHUNK + 77])
def test_tokens_with_small_words_are_found_with_and_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: str | None, vocab: int, most: int
) -> None:
    key = key_of(3, 4)
    wanted = np.flatnonzero(noise_words(key, np.arange(vocab)) <= most).tolist()
    assert hasattr(torch.ops.kvmesh, "small_words") == (kernel is None)
    assert tokens_of_words(key, vocab, most).tolist() == wanted
    monkeypatch.setattr(noise, "hasattr", lambda *_: False, raising=False)
    assert tokens_of_words(key, vocab, most).tolist() == wanted


def test_neighbouring_tokens_positions_and_seeds_have_nothing_to_do_with_each_other() -> None:
    count = 20_000
    tokens = noise_words(key_of(7, 0), np.arange(count + 768))
    for lag in (1, 2, 16, 128, 768):
        assert chi_square_of_pairs(tokens[:count], tokens[lag:][:count]) < CHI_SQUARE_99
    token = np.array([11])
    positions = np.array(
        [noise_words(key, token)[0] for key in keys(stream_starts([5] * count), range(count)).tolist()]
    )
    seeds = np.array([noise_words(key, token)[0] for key in keys(stream_starts(range(count)), [5] * count).tolist()])
    for words in (positions, seeds, tokens[:count]):
        assert chi_square_of_pairs(words[:-1], words[1:]) < CHI_SQUARE_99
    for other in (key_of(7, 1), key_of(8, 0)):
        assert chi_square_of_pairs(tokens[:count], noise_words(other, np.arange(count))) < CHI_SQUARE_99


def test_every_bit_of_a_word_depends_on_every_bit_of_token_and_key() -> None:
    tokens = np.arange(4096)
    for key in (0, key_of(1, 1)):
        words = noise_words(key, tokens)
        changed = [noise_words(key, tokens ^ 1 << bit) for bit in range(18)]
        changed += [noise_words(key ^ 1 << bit, tokens) for bit in range(64)]
        for other in changed:
            flips = [((words ^ other) >> np.uint32(bit) & np.uint32(1)).mean() for bit in range(32)]
            assert 0.42 < min(flips) < max(flips) < 0.58  # ten standard deviations


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel(noise_words(key_of(2, 2), np.arange(400_000))).astype(np.float64)
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    cells = np.histogram(np.exp(-np.exp(-noise)), bins=100, range=(0, 1))[0]
    assert ((cells - 4000) ** 2 / 4000).sum() < CHI_SQUARE_99


def test_noise_is_right_to_its_last_bits_also_where_it_decides() -> None:
    """The largest of 10^5 is of a word near 0, whose neighbours must differ."""
    edges = [np.arange(2000), 2**32 - 1 - np.arange(2000), 0x4AFB0CCC + np.arange(-500, 500), 2**31 + np.arange(-9, 9)]
    words = np.concatenate([*edges, np.random.default_rng(0).integers(0, 2**32, 100_000)]).astype(np.uint32)
    right = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2**32))
    assert np.abs(gumbel(words) - right).max() < 3e-6
    assert len(set(gumbel(np.arange(500, dtype=np.uint32)).tolist())) == 500
    assert gumbel(words).max() < 22.9
    assert gumbel(words).min() > -3.2


def test_weights_are_exponentials_in_whole_numbers() -> None:
    distances = np.linspace(0, 40, 100_001, dtype=np.float32)
    found = weights(distances)
    assert found[0] == 2**40
    assert (np.diff(found) <= 0).all()
    near = distances < 10
    np.testing.assert_allclose(found[near] / 2**40, np.exp(-distances[near].astype(np.float64)), rtol=2e-6)
    assert not weights(np.array([28, 1e30, np.inf], dtype=np.float32)).any()
    assert total_weight(distances) == int(found.sum())


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
def test_leaving_out_tokens_that_cannot_win_changes_no_draw(spread: float) -> None:
    """Compared with the noise of every token; with many near, few near, and equal tokens."""
    logits = np.random.default_rng(1).normal(0, spread, 3000).astype(np.float32)
    logits[::7] = logits[3]
    distances, best = logits.max() - logits, int(logits.argmax())
    drawing = drawing_of(SamplingParams(max_tokens=1))
    for key in keys(stream_starts(range(200)), [5] * 200).tolist():
        scores = gumbel(noise_words(key, np.arange(3000))) - distances
        assert draw([candidates(logits, best, key, drawing)]) == [int(scores.argmax())]
