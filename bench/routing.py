"""The cost of the KV index: lookups and memory. Prints one JSON line per figure.

    python -m bench.routing                                        # 10, 100, 1,000 instances; 1 M blocks
    python -m bench.routing --blocks 1000000 --blocks 10000000     # the second needs 2 GB

Each line is measured in its own process. Instances have the same number of blocks, in chains with a shared prefix.
Lookups are of 10,000 tokens in pages of 16: `shared`, half of which all instances have, and the rest to different
depths (the worst case); `hit`, which one instance has; `miss`. Figures are medians in µs. `hash_us` is the time of
hashing before a lookup.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from bench.load.report import machine_and_date
from components.routing.approximate_index import ApproximateIndex
from components.routing.kv_index import KvIndex
from components.wire.tokens import HASH_BYTES, block_hashes, seed_hash

PROMPT_TOKENS: Final = 10_000
PAGE_SIZE: Final = 16
DEPTH: Final = PROMPT_TOKENS // PAGE_SIZE
CHAIN: Final = 250  # blocks that a conversation adds to its instance
ROUNDS: Final = 200

Index = KvIndex | ApproximateIndex
Add = Callable[[str, Sequence[bytes]], object]


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - the shortest way to one number
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _chain(draw: random.Random, length: int) -> list[bytes]:
    return [draw.randbytes(HASH_BYTES) for _ in range(length)]


def _fill(add: Add, ids: Sequence[str], blocks: int, shared: Sequence[bytes], draw: random.Random) -> tuple[int, float]:
    """Fill an index. Return the number of added blocks, and the seconds without hashing."""
    added, spent_s = 0, 0.0
    for at, name in enumerate(ids):
        prefix = shared[: DEPTH // 2 + at * DEPTH // 2 // len(ids)]
        spent_s += _timed(lambda name=name, prefix=prefix: add(name, prefix))  # type: ignore[misc]
        added += len(prefix)
        left = blocks // len(ids)
        while left > 0:
            chain = _chain(draw, min(CHAIN, left))
            spent_s += _timed(lambda name=name, chain=chain: add(name, chain))  # type: ignore[misc]
            left -= len(chain)
            added += len(chain)
    return added, spent_s


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _lookup_us(find: Callable[[Sequence[bytes]], Mapping[str, int]], prompt: Sequence[bytes]) -> float:
    copies = [[bytes(bytearray(block)) for block in prompt] for _ in range(ROUNDS)]  # new objects, as from a request
    return round(statistics.median(_timed(lambda c=copy: find(c)) for copy in copies) * 1e6, 1)  # type: ignore[misc]


def _removal(index: KvIndex, ids: Sequence[str], draw: random.Random) -> dict[str, Any]:
    """Return the total time to remove an instance, and the longest pause for others during that."""
    removed_s = _timed(lambda: index.remove(ids[0]))
    longest_s, added = 0.0, 0
    while index._left:
        chain = _chain(draw, CHAIN)
        started = time.thread_time()  # not wall-clock time, because this machine may be busy
        index.add(ids[-1], chain)
        longest_s = max(longest_s, time.thread_time() - started)
        added += CHAIN
    return {"remove_us": round(removed_s * 1e6, 1), "sweep_longest_ms": round(longest_s * 1e3, 2), "sweep_adds": added}


def measure(kind: str, instances: int, blocks: int) -> dict[str, Any]:
    draw = random.Random(3)
    ids = [f"{n:08x}" for n in range(instances)]
    shared, whole, absent = (_chain(draw, DEPTH) for _ in range(3))
    before = _rss_bytes()
    index: Index = KvIndex(2 * blocks) if kind == "events" else ApproximateIndex(1e9, 2 * blocks)
    add = index.add if isinstance(index, KvIndex) else index.routed
    added, fill_s = _fill(add, ids, blocks, shared, draw)
    held_bytes = _rss_bytes() - before
    add(ids[-1], whole)
    found = index.find(shared)
    assert len(found) == instances
    tokens = [draw.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    hashing = [_timed(lambda: block_hashes(tokens, PAGE_SIZE, seed_hash("m"))) for _ in range(20)]
    figures: dict[str, Any] = {
        "figure": "index",
        "kind": kind,
        "instances": instances,
        "blocks": blocks,
        "bytes_per_block": round(held_bytes / (index.num_blocks if isinstance(index, KvIndex) else len(index)), 1),
        "add_us": round(fill_s / added * 1e6, 2),
        "shared_us": _lookup_us(index.find, shared),
        "hit_us": _lookup_us(index.find, whole),
        "miss_us": _lookup_us(index.find, absent),
        "hash_us": round(statistics.median(hashing) * 1e6, 1),
    }
    if isinstance(index, KvIndex):
        figures |= _removal(index, ids, draw)
    return figures


def main(
    instances: Annotated[list[int], typer.Option(help="instances; may be given several times")] = [10, 100, 1000],  # noqa: B006
    blocks: Annotated[list[int], typer.Option(help="blocks in total; may be given several times")] = [1_000_000],  # noqa: B006
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if one:
        print(json.dumps(measure(one, instances[0], blocks[0])))
        return
    for kind in ("events", "approximate"):
        for count in blocks:
            for number in instances:
                command = [sys.executable, "-m", "bench.routing", f"--one={kind}"]
                command += [f"--instances={number}", f"--blocks={count}"]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                print(json.dumps(json.loads(output) | machine_and_date()), flush=True)


if __name__ == "__main__":
    typer.run(main)
