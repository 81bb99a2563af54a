"""Prompts, answer lengths and arrival times."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "with",
    "as",
    "by",
    "at",
    "from",
    "it",
    "an",
    "are",
)
# mean lengths of ShareGPT, Kwon et al. 2023, arXiv:2309.06180, figure 11; the spread has tails like those in the plot
SHAREGPT_INPUT: Final = 161
SHAREGPT_OUTPUT: Final = 338
SHAREGPT_INPUT_SIGMA: Final = 1.2
SHAREGPT_OUTPUT_SIGMA: Final = 0.9


class Workload(StrEnum):
    RANDOM = "random"
    SHAREGPT = "sharegpt-like"
    SHARED_PREFIX = "shared-prefix"
    TRACE = "trace-replay"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    prompt: str
    input_len: int  # words, each of which is one token in every common vocabulary
    output_len: int  # tokens
    at_s: float | None = None  # time after the start of the load; None: closed loop


def words(draw: random.Random, length: int) -> str:
    """Return a random text of `length` tokens, for the beginning or after a space."""
    # a short English word after a space is one token in every common vocabulary
    return " ".join(draw.choice(WORDS) for _ in range(length))


def random_requests(
    draw: random.Random, count: int, input_len: int, output_len: int, range_ratio: float
) -> list[PlannedRequest]:
    """Return random prompts. Lengths are uniform between range_ratio times the length and the length."""
    return [
        _planned(draw, _between(draw, input_len, range_ratio), _between(draw, output_len, range_ratio))
        for _ in range(count)
    ]


def sharegpt_requests(
    draw: random.Random, count: int, input_len: int, output_len: int, max_len: int
) -> list[PlannedRequest]:
    planned = []
    for _ in range(count):
        wanted = lognormal(draw, output_len, SHAREGPT_OUTPUT_SIGMA)
        prompt = min(lognormal(draw, input_len, SHAREGPT_INPUT_SIGMA), max_len - 1)
        planned.append(_planned(draw, prompt, min(wanted, max_len - prompt)))
    return planned


def shared_prefix_requests(
    draw: random.Random, groups: int, per_group: int, prefix_len: int, input_len: int, output_len: int
) -> list[PlannedRequest]:
    planned = []
    for _ in range(groups):
        prefix = words(draw, prefix_len)
        for _ in range(per_group):
            text = f"{prefix} {words(draw, input_len)}"
            planned.append(PlannedRequest(text, prefix_len + input_len, output_len))
    draw.shuffle(planned)
    return planned


def poisson_times_s(draw: random.Random, rate: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += draw.expovariate(rate)


def lognormal(draw: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def _planned(draw: random.Random, input_len: int, output_len: int) -> PlannedRequest:
    return PlannedRequest(words(draw, input_len), input_len, output_len)


def _between(draw: random.Random, length: int, range_ratio: float) -> int:
    return draw.randint(max(1, math.ceil(length * range_ratio)), length)
