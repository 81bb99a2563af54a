"""Another process with pages of its own: `python -m tests.components.kv_transfer.nixl_peer <agent> [<backend> [<page size>]]`.

It prints its endpoint as JSON first, then reads a command from each line of its input:

- `expect <text> [<slot>]` waits for a notification, of aux slot 0 by default, and then prints the pages' contents.
- `pages` prints them at once.
- `receive <text> <tokens> <prefill's page size> <page>...` acts as decode: it prints its aux slot, verifies the KV
  after the transfer, and prints "landed" or the error.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from importlib import import_module

import msgspec
import numpy as np
from msgspec.structs import replace

from components.errors import MeshError
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.backends import kv_opener
from components.kv_transfer.checksum import PageChecksums
from components.wire.layout import KvLayout
from tests.device import TESTED
from tests.services.decode.inbound import inbound

LAYOUT = KvLayout(model="m", dtype="float32", page_size=16, layers=2, kv_heads=2, head_dim=64)
NUM_PAGES = 64
LATER_MS = 1 << 50  # a deadline after all tests


@dataclass
class Pages:
    """A page pool in plain memory."""

    layout: KvLayout = LAYOUT
    num_pages: int = NUM_PAGES
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.num_pages, self.layout.page_bytes), dtype=np.uint8)

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.shape, dtype=np.uint8)

    def set_all(self, value: int) -> None:
        self.memory[:] = value

    def hashes(self) -> list[str]:
        return [hashlib.blake2b(page.tobytes(), digest_size=8).hexdigest() for page in self.memory]


def on_tested_device(page_size: int = LAYOUT.page_size) -> Pages:
    """Like `of_size`, in the memory of the tested device."""
    host = of_size(page_size)
    if TESTED["device"] == "cpu":
        return host
    module = import_module("tests.components.kv_transfer.tensor_pages")  # torch takes a second to import
    pages: Pages = module.TensorPages(host.layout, host.num_pages, TESTED["device"])
    return pages


def of_size(page_size: int) -> Pages:
    """Make a pool of as many tokens in pages of this size."""
    return Pages(replace(LAYOUT, page_size=page_size), NUM_PAGES * LAYOUT.page_size // page_size)


async def receive(pages: Pages, transfer: KvTransfer, room: str, *facts: int) -> None:
    """Receive one transfer with stamp 1 and no cached pages."""
    num_tokens, page_size, *table = facts
    receiver = inbound(transfer, room=room, stamp=1, checksums=PageChecksums(pages), page_size=page_size)
    receiver.expose(0)
    say(str(receiver.slot))
    try:
        await receiver.landed(table, range(num_tokens))
        say("landed")
    except MeshError as exc:
        say(f"{type(exc).__name__}: {exc.message}")


def state(pages: Pages, transfer: KvTransfer) -> str:
    return json.dumps({"pages": pages.hashes(), "aux": [asdict(transfer.aux.read(slot)) for slot in range(4)]})


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(agent: str, backend: str = "nixl", page_size: int = LAYOUT.page_size) -> None:
    pages = on_tested_device(page_size)
    waiting = set()

    async def answer(landed: Awaitable[None]) -> None:
        await landed
        say(state(pages, transfer))

    async with kv_opener(backend)(pages, agent, "127.0.0.1", NUM_PAGES) as transfer:
        say(msgspec.json.encode(transfer.endpoint).decode())
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            if line[0] == "expect":
                waiting.add(asyncio.ensure_future(answer(transfer.expect(line[1], int(line[2]) if line[2:] else 0))))
                say("expecting")
            elif line[0] == "receive":
                waiting.add(asyncio.ensure_future(receive(pages, transfer, line[1], *map(int, line[2:]))))
            else:
                say(state(pages, transfer))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
