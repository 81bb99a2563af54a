"""One end of bench.gpu's transfer: `python -m bench.gpu.transfer_end receive|send LAYOUT PAGES DEVICE`.

The receiver prints its endpoint, then answers each line `COUNT` with a hash of its first COUNT pages. The sender reads
the receiver's endpoint. For a line `COUNT` or `COUNT scattered` it writes this number of pages several times; for
`reconnect` it connects again.
"""

import asyncio
import hashlib
import json
import random
import statistics
import sys
import time
from contextlib import suppress

import msgspec
import torch

from components.kv_transfer.nixl_transfer import POLL_WRITES_S, NixlTransfer, open_nixl
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout, KvRegion
from engine.kv.storage import allocate_storage

ROUNDS = 12
WARM_UP = 2
LATER_MS = 1 << 50  # a deadline after all rounds
WRITE_S = 20.0  # for one write


def digest(pool: torch.Tensor, count: int) -> str:
    """Return a hash of the pages, which are copied to the host."""
    data = pool[:count].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


async def receive(transfer: NixlTransfer, pool: torch.Tensor) -> None:
    transfer.expect("never", 0)  # keeps its thread polling

    async def keep_going() -> None:
        while True:
            transfer.poll_often("never")  # as prefill's announcement does
            await asyncio.sleep(POLL_WRITES_S)

    going = asyncio.create_task(keep_going())
    print(json.dumps(msgspec.to_builtins(transfer.endpoint)), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(digest(pool, int(line))), flush=True)
    going.cancel()
    with suppress(asyncio.CancelledError):
        await going


async def send(transfer: NixlTransfer, pool: torch.Tensor) -> None:
    peer = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=KvEndpoint)
    await transfer.connect(peer)
    print(json.dumps("connected"), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        if line == ["reconnect"]:
            await transfer.disconnect(peer.agent)
            await transfer.connect(peer)
            print(json.dumps("connected"), flush=True)
        else:
            print(json.dumps(await _measured(transfer, pool, peer.agent, *line)), flush=True)


async def _measured(
    transfer: NixlTransfer, pool: torch.Tensor, agent: str, count: str, order: str = ""
) -> dict[str, float | str]:
    """Measure writes. A GPU copies neighbouring pages at once; in a pool in use, pages are scattered."""
    source, target = list(range(int(count))), list(range(int(count)))
    if order == "scattered":
        draw = random.Random(1)
        draw.shuffle(source)
        draw.shuffle(target)
    pool.normal_()
    if pool.is_cuda:
        torch.cuda.synchronize()
    spent = []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        async with asyncio.timeout(WRITE_S):
            await transfer.write_pages(agent, source, target, LATER_MS)
        spent.append(time.perf_counter() - started)
    expected = torch.empty_like(pool[: len(source)])
    expected[target] = pool[source]
    return {"seconds": statistics.median(spent[WARM_UP:]), "digest": digest(expected, len(source))}


async def main(role: str, layout: KvLayout, num_pages: int, device: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)
    pool = allocate_storage(layout, num_pages, torch.device(device))
    region = KvRegion(pool.data_ptr(), num_pages, layout, str(pool.device))
    async with open_nixl(region, f"bench-{role}") as transfer:
        await (receive if role == "receive" else send)(transfer, pool)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=KvLayout), int(sys.argv[3]), sys.argv[4]))
