"""Where chance comes from: one number for each (seed, position).

Counter-based, so there is no state that would have to move with a request. Source: Philox, Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3".
"""

from typing import Final

import numpy as np

SEED_MASK: Final = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that belongs to (seed, position), whatever the batch, the worker or the history.

    32 bits, so that it is below 1 in every float type it meets.
    """
    raw = np.random.Philox(key=seed & SEED_MASK, counter=position).random_raw()
    return float(int(raw) >> 32) / 2**32
