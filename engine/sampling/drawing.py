"""Draws a row's token, in the number formats of `noise`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from components.wire.sampling import SamplingParams
from engine.sampling.noise import Floats, Ids, Words, gumbel, noise_words, tokens_of_words, total_weight, weights

COLDEST: Final = 1e-12  # lowest temperature
EVERY: Final = float(np.finfo(np.float32).max)  # greatest distance of a token that is not excluded
SHARE_BITS: Final = 30
WHOLE: Final = 1 << SHARE_BITS  # share without top_p
STEPS: Final = (np.float32(4), np.float32(12))  # distances that are tried first; most distributions are within them
WEIGHTLESS: Final = np.float32(28)  # distance without weight; 2^-40 is at 27.7
FEW: Final = 512  # tokens that are scored first
ROUNDING: Final = 1.001  # margin for rounding errors of noise and distances, up to 1e-5


@dataclass(frozen=True, slots=True)
class Drawing:
    """A token's distance is (largest logit - its logit) / temperature, in float32.

    The token with the largest noise - distance is drawn; of equal ones the first. This is a draw from the softmax.

    Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030.
    """

    inverse: float  # 1 / temperature; 0 if greedy
    reach: float  # greatest distance that min_p allows
    top_k: int  # 0: all
    share: int  # top_p in 2^-30

    @property
    def is_greedy(self) -> bool:
        return self.inverse == 0

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.share < WHOLE


def drawing_of(params: SamplingParams) -> Drawing:
    return Drawing(
        inverse=_float32(1 / max(params.temperature, COLDEST)) if params.temperature > 0 else 0.0,
        reach=_float32(abs(math.log(params.min_p))) if params.min_p > 0 else EVERY,
        top_k=max(params.top_k, 0),
        share=max(1, round(params.top_p * WHOLE)),
    )


def weight_to_reach(total: int, share: int) -> int:
    return -(-total * share // WHOLE)


@dataclass(frozen=True, slots=True)
class Distances:
    """A row's distances, computed only for tokens that may be drawn."""

    logits: Floats  # [vocab]
    largest: np.float32
    drawing: Drawing

    def of(self, token_ids: Ids) -> Floats:
        found: Floats = (self.largest - self.logits[token_ids]) * np.float32(self.drawing.inverse)
        return found

    def within(self, limit: np.float32) -> tuple[Ids, Floats]:
        """Return the tokens up to a distance, ascending, and their distances."""
        # one comparison of all logits finds these and perhaps a few more, because distances are rounded
        bound = float(self.largest) - float(limit) / self.drawing.inverse * ROUNDING
        token_ids = np.flatnonzero(self.logits >= np.float32(max(bound - abs(bound) * 1e-6, -EVERY)))
        found = self.of(token_ids)
        is_near = found <= limit
        return token_ids[is_near], found[is_near]


class Candidates(NamedTuple):
    """A row's tokens that may be drawn."""

    token_ids: Ids
    words: Words  # random bits of their noise
    distances: Floats


def candidates(logits: Floats, best: int, key: int, drawing: Drawing) -> Candidates:
    """`logits`: [vocab], adjusted. `best`: the first token with the largest one, which is finite."""
    distances = Distances(logits, logits[best], drawing)
    if drawing.cuts:
        token_ids = kept(distances)
    elif drawing.reach < EVERY:
        token_ids, _ = distances.within(np.float32(drawing.reach))
    else:
        token_ids = _possible_winners(distances, key)
    return Candidates(token_ids, noise_words(key, token_ids), distances.of(token_ids))


def draw(rows: Sequence[Candidates]) -> list[int]:
    noise = gumbel(np.concatenate([row.words for row in rows]))  # together, because most rows have few
    drawn, end = [], 0
    for row in rows:
        start, end = end, end + len(row.words)
        scores = noise[start:end] - row.distances
        drawn.append(int(row.token_ids[scores == scores.max()].min()))
    return drawn


def kept(distances: Distances) -> Ids:
    """Return the tokens, ascending, that min_p, top_k and top_p keep in this order.

    top_k keeps the nearest, lower ids first among equals; top_p keeps their smallest set with that share of the weight.

    Source: top-k, Fan et al. 2018, arXiv:1805.04833; nucleus, Holtzman et al. 2020, arXiv:1904.09751.
    """
    drawing = distances.drawing
    reach, top_k = np.float32(drawing.reach), drawing.top_k
    least = 0  # weight to reach
    if not top_k:  # tokens without weight are never needed
        _, near = distances.within(min(reach, WEIGHTLESS))
        least = weight_to_reach(total_weight(near), drawing.share)
    for limit in (*STEPS, reach):
        token_ids, found = distances.within(min(limit, reach))
        if len(token_ids) >= top_k if top_k else total_weight(found) >= least:
            break
    if 0 < top_k < len(token_ids):
        nearest = found <= np.partition(found, top_k - 1)[top_k - 1]
        token_ids, found = token_ids[nearest], found[nearest]
    order = found.argsort(kind="stable")
    if top_k:
        order = order[:top_k]
    if drawing.share < WHOLE:
        mass = weights(found[order])
        least = weight_to_reach(int(mass.sum()), drawing.share) if top_k else least
        order = order[np.cumsum(mass) - mass < least]
    return np.sort(token_ids[order])


def _possible_winners(distances: Distances, key: int) -> Ids:
    """Return tokens that may have the largest score, noise - distance.

    For v, the share of a token's word in 2^32, its noise is between log(1/v - 1) and log(1/v).
    """
    near, found = distances.within(STEPS[0])
    beyond = 0.0 if len(near) > FEW else float(STEPS[0])  # least distance of the others
    near, found = near[:FEW], found[:FEW]
    shares = (noise_words(key, near) + 0.5) / 2**32
    least = float((np.log(1 / shares - 1) - found).max())  # bound of the best score
    near = near[shares <= math.exp(-least) * ROUNDING]
    most = min(math.exp(-least - beyond) * ROUNDING * 2**32, 2**32 - 1)
    return np.concatenate([near, tokens_of_words(key, len(distances.logits), int(most))])


def _float32(value: float) -> float:
    return float(np.float32(value))
