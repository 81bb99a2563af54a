"""Random numbers by (seed, position): each seed has a SplitMix64 stream.

So no state moves with a request. Integers on the host are equal on every device.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

SEED_MASK: Final = (1 << 64) - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd
FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND: Final = np.uint64(0x94D049BB133111EB)
UNUSED_BITS: Final = np.uint64(11)  # of 64: a float64 has 53


def stream_starts(seeds: Iterable[int]) -> Words:
    return _mixed(np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64) + GOLDEN)


def uniforms(starts: Words, positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Draws in [0, 1)."""
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    return (_mixed(starts + counters * GOLDEN) >> UNUSED_BITS).astype(np.float64) * np.float64(2.0**-53)


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * FIRST
    words = (words ^ (words >> np.uint64(27))) * SECOND
    return words ^ (words >> np.uint64(31))
