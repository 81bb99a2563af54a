"""Noise and weights of tokens, with the same bits on every device.

Each step is an integer operation, or a float32 addition or multiplication whose rounding IEEE 754 defines. So a CPU and
`device_kernel` draw the same token from the same logits.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]
LongWords = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SEED_MASK: Final = (1 << 64) - 1
# SplitMix64: 2^64 divided by the golden ratio, and the factors of its finaliser
GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
# the same for 32 bits, and the factors of a finaliser with little bias
SPREAD: Final = 0x9E3779B9
LEFT: Final = 0x7FEB352D
RIGHT: Final = 0x846CA68B

LN_2: Final = 0.6931471805599453
LOG2_E: Final = 1.4426950408889634
ROOT_HALF_BITS: Final = 0x3F3504F3  # bits of sqrt(1/2) in float32
MANTISSA: Final = 0x7FFFFF
# log(1 + r) = r + r² (c0 + c1 r + …) for 1 + r from sqrt(1/2) to sqrt(2), within 1.1e-7
LOG: Final = (
    -0.49999988079071045,
    0.33333927392959595,
    -0.25002041459083557,
    0.19963088631629944,
    -0.1656494140625,
    0.1490267515182495,
    -0.14339259266853333,
    0.088142029941082,
)
# 2^-f = c0 + c1 f + … for f from 0 to 1, within 2.1e-7
POWER: Final = (
    1.0,
    -0.6931470036506653,
    0.2402239441871643,
    -0.05548931285738945,
    0.009576806798577309,
    -0.0012728736037388444,
    0.00010845286305993795,
)
WEIGHT_BITS: Final = 40  # the most probable token weighs 2^40
FRACTION_BITS: Final = 24  # of a power before it is shifted
CHUNK: Final = 16384  # tokens at once, to stay in the processor's cache

_LOG: Final = np.array(LOG, dtype=np.float32)
_POWER: Final = np.array(POWER, dtype=np.float32)
_LN_2: Final = np.float32(LN_2)
_LOG2_E: Final = np.float32(LOG2_E)
_ONE: Final = np.float32(1)
_HALF: Final = np.float32(0.5)
_UNIT: Final = np.float32(2.0**-32)


def stream_starts(seeds: Iterable[int]) -> LongWords:
    """Return the start of each seed's SplitMix64 stream. Its positions are computed directly, so a request has no state.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    return _mixed(np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64) + np.uint64(GOLDEN))


def keys(starts: LongWords, positions: Sequence[int]) -> LongWords:
    """Return the streams' numbers at `positions`, the keys of noise."""
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    return _mixed(starts + counters * np.uint64(GOLDEN))


def _mixed(words: LongWords) -> LongWords:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))


def noise_words(key: int, token_ids: Ids) -> Words:
    """Return 32 random bits per token, by two keyed rounds of a finaliser over its id.

    Source of the factors: Wellons 2018, "Prospecting for hash functions".
    """
    return _hashed(token_ids.astype(np.uint32), *_halves(key))


def tokens_of_words(key: int, vocab: int, most: int) -> Ids:
    """Return the tokens with words up to `most`, ascending."""
    low, high = _halves(key)
    if hasattr(torch.ops.kvmesh, "small_words"):
        found = torch.empty(vocab, dtype=torch.int64)
        count = torch.ops.kvmesh.small_words(found, int(low), int(high), most)
        ids: Ids = found[:count].numpy()
        return ids
    words = np.arange(vocab, dtype=np.uint32)
    for at in range(0, vocab, CHUNK):
        _hashed(words[at : at + CHUNK], low, high)
    return np.flatnonzero(words <= np.uint32(most))


def _halves(key: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def _hashed(words: Words, low: np.uint32, high: np.uint32) -> Words:
    """Hash `words` in place."""
    words *= np.uint32(SPREAD)
    words += low
    _finalise(words)
    words += high
    _finalise(words)
    return words


def _finalise(words: Words) -> None:
    words ^= words >> np.uint32(16)
    words *= np.uint32(LEFT)
    words ^= words >> np.uint32(15)
    words *= np.uint32(RIGHT)
    words ^= words >> np.uint32(16)


def gumbel(words: Words) -> Floats:
    """Convert words to Gumbel noise, from -3.2 to 22.9: -log(-log(1 - v)) for v = (word + 1/2) / 2^32.

    A small v is not rounded to a multiple of 2^-24, because the largest noise among 10^5 tokens decides.
    """
    small = (words.astype(np.float32) + _HALF) * _UNIT
    rest = ((~words).astype(np.float32) + _HALF) * _UNIT  # 1 - v
    exponent, r = _parts(rest)
    r = np.where(exponent == 0, -small, r)
    exponent, r = _parts(-_log(exponent, r))
    return -_log(exponent, r)


def _parts(values: Floats) -> tuple[Floats, Floats]:
    """Return (e, m - 1) of each value m 2^e, with m from sqrt(1/2) to sqrt(2)."""
    shifted = values.view(np.int32) - np.int32(ROOT_HALF_BITS)
    mantissa = (shifted & np.int32(MANTISSA)) + np.int32(ROOT_HALF_BITS)
    return (shifted >> np.int32(23)).astype(np.float32), mantissa.view(np.float32) - _ONE


def _log(exponent: Floats, r: Floats) -> Floats:
    return exponent * _LN_2 + (r + (r * r) * _polynomial(_LOG, r))


def _polynomial(factors: Floats, x: Floats) -> Floats:
    out = x * factors[-1] + factors[-2]
    for factor in factors[-3::-1]:
        out *= x
        out += factor
    return out


def weights(distances: Floats) -> Ids:
    """Return exp(-distance) for distances >= 0, in 2^-40: integers, so sums do not depend on their order."""
    scaled = np.minimum(distances * _LOG2_E, np.float32(63))
    whole = scaled.astype(np.int32)
    power = _polynomial(_POWER, scaled - whole.astype(np.float32))
    fraction = (power * np.float32(1 << FRACTION_BITS)).astype(np.int64)
    return (fraction << np.int64(WEIGHT_BITS - FRACTION_BITS)) >> whole.astype(np.int64)


def total_weight(distances: Floats) -> int:
    return sum(int(weights(distances[at : at + CHUNK]).sum()) for at in range(0, len(distances), CHUNK))
