"""Check whether a KV transfer backend works here: `python -m components.kv_transfer.try_backend <setting>`.

It runs in its own process, because a backend's library cannot be unloaded.
"""

import asyncio
import ctypes
import mmap
import sys
from typing import Final

from components.errors import BackendUnavailable
from components.kv_transfer.backends import kv_opener
from components.startup import WrongSettings, refuse
from components.wire.layout import KvLayout, KvRegion

LAYOUT: Final = KvLayout(model="check", dtype="float32", page_size=16, layers=1, kv_heads=1, head_dim=16)


async def check(setting: str) -> None:
    memory = mmap.mmap(-1, LAYOUT.page_bytes)
    page = KvRegion(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, LAYOUT, "cpu")
    async with kv_opener(setting)(page, "check", "127.0.0.1", 1):
        pass


if __name__ == "__main__":
    try:
        asyncio.run(check(sys.argv[1]))
    except (WrongSettings, BackendUnavailable) as exc:
        refuse(exc.message)
