"""The cost of transferring KV pages between two processes. Prints one JSON line per figure.

    python -m bench.transfer                                             # pages of 16, 32 and 64 tokens
    python -m bench.transfer --layers 32 --kv-heads 8 --head-dim 128 --page-size 16 --pages 1 --pages 64

It transfers the same bytes in four ways, by turns: our backend writes scattered pages, and neighbouring ones; NIXL's
own API writes one block; a plain copy writes to shared memory. µs are medians; ratios are of times. The last line of
each page size is about small writes.
"""

import asyncio
import base64
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import typer

from bench.load.report import machine_and_date
from bench.transfer_peer import Pool, digest, plain_agent
from components.kv_transfer.nixl_transfer import NixlTransfer, open_nixl
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout

REPO: Final = Path(__file__).resolve().parents[1]
WARM_UP: Final = 2  # uncounted writes of each kind
LATER_MS: Final = 1 << 50  # a deadline after all rounds
FIXED_ROUNDS: Final = 5  # factor of the number of rounds for the smallest write

Move = Callable[[], Awaitable[object]]


class Peer:
    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        facts = json.loads(self._line())
        self.endpoint = msgspec.convert(facts["endpoint"], KvEndpoint)
        self.plain_metadata = base64.b64decode(facts["plain_metadata"])
        self.shared_name = str(facts["shared"])

    def landed(self, num_pages: int) -> list[str]:
        """Return hashes of the first pages, and of as much shared memory."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{num_pages}\n")
        self._popen.stdin.flush()
        return [str(one) for one in json.loads(self._line())]

    def _line(self) -> str:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            sys.exit(f"the receiving process ended with {self._popen.wait()}")
        return line


@contextmanager
def receiving(layout: KvLayout, num_pages: int, prefix: str) -> Iterator[Peer]:
    described = msgspec.json.encode(layout).decode()
    command = [*shlex.split(prefix), sys.executable, "-m", "bench.transfer_peer", described, str(num_pages)]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Peer(popen)
        finally:
            assert popen.stdin is not None
            popen.stdin.close()  # then it ends
            popen.wait(20)


@dataclass(frozen=True, slots=True)
class Ends:
    pool: Pool
    peer: Peer
    transfer: NixlTransfer
    agent: Any  # NIXL's own
    shared: "np.ndarray[Any, np.dtype[np.uint8]]"

    def scattered(self, count: int) -> Move:
        """Write pages by our backend in opposite orders, so that none are merged."""
        return self._pages(range(count), range(count)[::-1])

    def neighbours(self, count: int) -> Move:
        return self._pages(range(count), range(count))

    def aux(self) -> Move:
        return lambda: self.transfer.write_aux(self.peer.endpoint.agent, 0, 0, "bench", LATER_MS)

    def plain(self, count: int) -> Move:
        num_bytes = count * self.pool.region.layout.page_bytes
        local = self.agent.get_xfer_descs([(self.pool.region.address, num_bytes, 0)], mem_type="DRAM")
        remote = self.agent.get_xfer_descs([(self.peer.endpoint.base_address, num_bytes, 0)], mem_type="DRAM")
        handle = self.agent.initialize_xfer("WRITE", local, remote, "plain-receiver")

        async def move() -> None:
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                sys.exit(f"NIXL's own write ended as {state}")

        return move

    def memcpy(self, count: int) -> Move:
        source = self.pool.memory.reshape(-1)[: count * self.pool.region.layout.page_bytes]
        target = self.shared[: len(source)]

        async def move() -> None:
            np.copyto(target, source)

        return move

    async def check(self, count: int) -> None:
        """Check each way. Exit if the first `count` pages have not arrived."""
        for way, (move, place) in {
            "our backend": (self.neighbours(count), 0),
            "NIXL's own API": (self.plain(count), 0),
            "memcpy": (self.memcpy(count), 1),
        }.items():
            self.pool.memory[:count] = np.frombuffer(random.randbytes(self.pool.region.layout.page_bytes), np.uint8)
            await move()
            if self.peer.landed(count)[place] != digest(self.pool.memory[:count].data.cast("B")):
                sys.exit(f"{way}: other bytes arrived than were sent")

    def _pages(self, source: Sequence[int], target: Sequence[int]) -> Move:
        return lambda: self.transfer.write_pages(self.peer.endpoint.agent, source, target, LATER_MS)


async def time_us(move: Move) -> float:
    started = time.perf_counter()
    await move()
    return (time.perf_counter() - started) * 1e6


async def times_us(moves: dict[str, Move], rounds: int) -> dict[str, float]:
    """Return medians over `rounds`, in random order, because later ways find the bytes in the cache."""
    order = list(moves.items())
    taken: dict[str, list[float]] = {name: [] for name in moves}
    for round_ in range(WARM_UP + rounds):
        random.shuffle(order)
        for name, move in order:
            taken_us = await time_us(move)
            if round_ >= WARM_UP:
                taken[name].append(taken_us)
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


async def fixed_us(ends: Ends, rounds: int) -> dict[str, float]:
    """Measure one page in each way, the aux record, and a page directly after it."""
    page = {"scattered": ends.scattered(1), "nixl": ends.plain(1), "memcpy": ends.memcpy(1)}
    alone = await times_us(page, rounds)
    aux = await times_us({"aux": ends.aux()}, rounds)
    behind = []
    for _ in range(rounds):
        await ends.aux()()
        behind.append(await time_us(ends.scattered(1)))
    return {**alone, **aux, "after_aux": round(statistics.median(behind), 1)}


def figure(layout: KvLayout, pages: int, us: dict[str, float]) -> dict[str, Any]:
    num_bytes = pages * layout.page_bytes
    speeds = {f"{name}_gb_s": round(num_bytes / value / 1e3, 2) for name, value in us.items()}
    ratios = {
        f"{ours}_over_{other}": round(us[ours] / us[other], 2)
        for ours in ("scattered", "neighbours")
        for other in ("nixl", "memcpy")
    }
    return {
        **_shape(layout),
        "pages": pages,
        "bytes": num_bytes,
        **{f"{name}_us": value for name, value in us.items()},
        **speeds,
        **ratios,
        **machine_and_date(),
    }


def fixed(layout: KvLayout, us: dict[str, float]) -> dict[str, Any]:
    """Return the times of one page, of one page without its plain copy, of the aux record, and of a page after it."""
    beyond = {f"{name}_fixed_us": round(us[name] - us["memcpy"], 1) for name in ("scattered", "nixl")}
    return {
        **_shape(layout),
        "figure": "fixed cost",
        **{f"{name}_us": value for name, value in us.items()},
        **beyond,
        **machine_and_date(),
    }


def _shape(layout: KvLayout) -> dict[str, Any]:
    return {"page_size": layout.page_size, "page_bytes": layout.page_bytes}


async def measure_page_size(layout: KvLayout, counts: Sequence[int], rounds: int, prefix: str) -> None:
    num_pages = max(counts)
    pool = Pool(layout, num_pages)
    with receiving(layout, num_pages, prefix) as peer:
        shared = _attach(peer)
        try:
            async with open_nixl(pool.region, "sender") as transfer:
                await transfer.connect(peer.endpoint)
                agent = plain_agent("plain-sender", pool)
                agent.add_remote_agent(peer.plain_metadata)
                assert shared.buf is not None, "open"
                view = np.frombuffer(shared.buf, dtype=np.uint8)
                ends = Ends(pool, peer, transfer, agent, view)
                await ends.check(min(4, *counts))
                for count in counts:
                    moves = {
                        "scattered": ends.scattered(count),
                        "neighbours": ends.neighbours(count),
                        "nixl": ends.plain(count),
                        "memcpy": ends.memcpy(count),
                    }
                    print(json.dumps(figure(layout, count, await times_us(moves, rounds))), flush=True)
                print(json.dumps(fixed(layout, await fixed_us(ends, FIXED_ROUNDS * rounds))), flush=True)
                del ends, view, moves
        finally:
            shared.close()


def _attach(peer: Peer) -> SharedMemory:
    shared = SharedMemory(peer.shared_name)
    resource_tracker.unregister(f"/{peer.shared_name}", "shared_memory")
    return shared


def main(
    page_size: Annotated[list[int], typer.Option(help="tokens per page; may be given several times")] = [16, 32, 64],  # noqa: B006
    pages: Annotated[list[int], typer.Option(help="pages per write; may be given several times")] = [1, 4, 16, 64],  # noqa: B006
    *,
    layers: Annotated[int, typer.Option(help="layers of the model", min=1)] = 30,
    kv_heads: Annotated[int, typer.Option(help="KV heads of the model", min=1)] = 3,
    head_dim: Annotated[int, typer.Option(help="head size of the model", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="measured writes of each kind", min=1)] = 30,
    receiver: Annotated[
        str, typer.Option(help="command that starts the receiving process, such as `ip netns exec NAME`; default: none")
    ] = "",
) -> None:
    if min(*pages, *page_size, 1) < 1:
        sys.exit("--pages and --page-size must be at least 1")
    for size in page_size:
        layout = KvLayout(
            model="bench", dtype="bfloat16", page_size=size, layers=layers, kv_heads=kv_heads, head_dim=head_dim
        )
        asyncio.run(measure_page_size(layout, pages, rounds, receiver))


if __name__ == "__main__":
    typer.run(main)
