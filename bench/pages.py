"""Runs of neighbouring pages that a full page pool allocates, and their cost. Prints one JSON line per pool.

    python -m bench.pages

Requests arrive and end, `live` at a time, and grow by their answers. NIXL needs one descriptor per run. The first half
of the requests fills the pool, the second half is measured.
"""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean
from typing import Final

import typer

from engine.kv.page_pool import PagePool, PrefixCache

PAGE_SIZE: Final = 16  # tokens
GROWTH: Final = 8  # tokens of each answer between two prompts


@dataclass(frozen=True, slots=True)
class Traffic:
    """A load whose lengths are drawn between two bounds."""

    num_pages: int
    live: int  # concurrent requests
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]


@dataclass(slots=True)
class Live:
    name: int
    pages: list[int]
    tokens: int  # so far
    until: int  # tokens, prompt and answer


CASES: Final = (
    Traffic(8192, 8, (231, 231), (0, 0)),
    Traffic(8192, 16, (231, 231), (64, 64)),
    Traffic(8192, 32, (50, 2000), (10, 300)),
    Traffic(65536, 64, (50, 8000), (10, 600)),
)


def deal(traffic: Traffic, prompts: int, draw: random.Random) -> Iterator[tuple[list[int], float]]:
    prefix = PrefixCache()
    pool = PagePool(traffic.num_pages, prefix)
    live: list[Live] = []
    for name in range(prompts):
        tokens = draw.randint(*traffic.prompt_tokens)
        spent_s = -time.perf_counter()
        pages = pool.allocate(-(-tokens // PAGE_SIZE))
        live.append(Live(name, list(pages), tokens, tokens + draw.randint(*traffic.answer_tokens)))
        while len(live) >= traffic.live:
            for request in list(live):
                request.tokens = min(request.tokens + GROWTH, request.until)
                if request.tokens > len(request.pages) * PAGE_SIZE:
                    request.pages += pool.allocate(1, after=request.pages[-1])
                if request.tokens == request.until:
                    live.remove(request)
                    full = request.pages[: request.until // PAGE_SIZE]
                    prefix.insert([b"%d %d" % (request.name, index) for index in range(len(full))], full)
                    pool.release(request.pages)
        yield pages, spent_s + time.perf_counter()


def main(prompts: int = 6000) -> None:
    for traffic in CASES:
        dealt = list(deal(traffic, prompts, random.Random(1)))[prompts // 2 :]
        runs = mean(1 + sum(1 for page, after in pairwise(pages) if after != page + 1) for pages, _ in dealt)
        figures = {
            "pages_a_prompt": round(mean(len(pages) for pages, _ in dealt), 1),
            "runs_a_prompt": round(runs, 2),
            "us_a_request": round(1e6 * mean(seconds for _, seconds in dealt), 1),
        }
        print(json.dumps({**asdict(traffic), **figures}))


if __name__ == "__main__":
    typer.run(main)
