"""Requests of traces and synthetic loads, generated on demand."""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import cos, pi, sin
from pathlib import Path

from bench.load.replay import BLOCK, read_trace
from bench.load.workloads import lognormal, poisson_times_s
from components.wire.tokens import HASH_BYTES


@dataclass(slots=True, eq=False)
class Request:
    number: int
    at_s: float
    prompt: int  # tokens
    output: int
    blocks: list[bytes]  # of its full blocks
    session: str = ""
    first_s: float = -1.0  # time of its first token; -1: none yet


class Names:
    """Block names, of which equal ones are one object, to save memory."""

    def __init__(self) -> None:
        self._names: dict[int, bytes] = {}

    def of(self, block: int) -> bytes:
        return self._names.setdefault(block, block.to_bytes(HASH_BYTES, "little"))


def trace(path: Path, count: int | None = None, speed: float = 1.0) -> Iterator[Request]:
    """Yield requests of a trace in Mooncake's format, with blocks of 512 tokens; a partial block is never cached.

    The second block identifies a session, because the first is nearly always the same.
    Raises: ValueError, OSError.
    """
    names = Names()
    for number, line in enumerate(read_trace(path, count)):
        ids = line.hash_ids[: line.input_length // BLOCK]
        session = f"block-{ids[1]}" if len(ids) > 1 else f"alone-{number}"
        blocks = [names.of(block) for block in ids]
        at_s = line.timestamp_ms / 1000 / speed
        yield Request(number, at_s, max(1, line.input_length), max(1, line.output_length), blocks, session)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens; prefix and block are fixed."""

    prefix: int = 2048
    question: int = 512
    answer: int = 128
    sigma: float = 0.8  # parameter of log-normal questions and answers
    block: int = BLOCK


def shared_prefixes(
    seed: int, count: int, rate: float, groups: int, skew: float, lengths: Lengths = Lengths()
) -> Iterator[Request]:
    """Yield Poisson arrivals at `rate` per second, each a new question after one of `groups` system prompts.

    System prompt k has weight 1 / k**skew.
    """
    draw = random.Random(seed)
    names = Names()
    weights = list(itertools.accumulate(1 / k**skew for k in range(1, groups + 1)))
    times = poisson_times_s(draw, rate)
    shared = lengths.prefix // lengths.block
    for number in range(count):
        group = draw.choices(range(groups), cum_weights=weights)[0]
        prompt = lengths.prefix + lognormal(draw, lengths.question, lengths.sigma)
        blocks = [names.of(group * shared + i) for i in range(shared)]
        blocks += _own_blocks(number, prompt // lengths.block - shared)
        answer = lognormal(draw, lengths.answer, lengths.sigma)
        yield Request(number, next(times), prompt, answer, blocks, f"group-{group}")


def conversations(
    seed: int, count: int, rate: float, turns: float, think_s: float, lengths: Lengths = Lengths()
) -> Iterator[Request]:
    """Yield conversations with one system prompt, in which each turn repeats all before it.

    Args:
        count: total number of requests.
        rate: mean requests per second in the steady state; conversations begin at `rate / turns`.
        turns: mean of a geometric distribution.
        think_s: mean time between two turns' arrivals.
    """
    draw = random.Random(seed)
    shared = [block.to_bytes(HASH_BYTES, "little") for block in range(lengths.prefix // lengths.block)]
    begins = poisson_times_s(draw, rate / turns)
    turn_s: list[tuple[float, int, int]] = []  # next turns: time, conversation, tokens before it
    begin_s, begun = next(begins), 0
    blocks_of: dict[int, list[bytes]] = {}  # by conversation
    for number in range(count):
        while not turn_s or begin_s <= turn_s[0][0]:
            heappush(turn_s, (begin_s, begun, lengths.prefix))
            blocks_of[begun] = list(shared)
            begin_s, begun = next(begins), begun + 1
        at_s, conversation, before = heappop(turn_s)
        prompt = before + lognormal(draw, lengths.question, lengths.sigma)
        answer = lognormal(draw, lengths.answer, lengths.sigma)
        earlier = blocks_of[conversation]
        blocks = blocks_of[conversation] = earlier + _own_blocks(number, prompt // lengths.block - len(earlier))
        if draw.random() < 1 / turns:
            del blocks_of[conversation]
        else:
            heappush(turn_s, (at_s + draw.expovariate(1 / think_s), conversation, prompt + answer))
        yield Request(number, at_s, prompt, answer, blocks, f"conversation-{conversation}")


def swinging(requests: Iterable[Request], swing: float, period_s: float) -> Iterator[Request]:
    """Yield the same requests with their rate multiplied by `1 + swing · sin(2π t / period_s)`; `swing` < 1."""
    per_s, at_s, last_s = 2 * pi / period_s, 0.0, 0.0
    for request in requests:
        for _ in range(50):  # Newton's method on the integral of the rate
            off = at_s + swing / per_s * (1 - cos(per_s * at_s)) - request.at_s
            at_s -= off / (1 + swing * sin(per_s * at_s))
            if abs(off) < 1e-9:
                break
        request.at_s = last_s = at_s = max(last_s, at_s)  # equal times may differ by a rounding
        yield request


def _own_blocks(number: int, count: int) -> list[bytes]:
    base = (number + 1) << 64
    return [(base + i).to_bytes(HASH_BYTES, "little") for i in range(max(0, count))]
