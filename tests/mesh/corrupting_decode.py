"""`services.decode`, in whose pool KV changes when it has landed, before decode looks: environment DAMAGE says how."""

import asyncio
import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from components.kv_transfer.receiver import Receiver
from components.process import run
from engine.mock.memory import MARK
from services.decode.__main__ import main
from services.decode.config import DecodeSettings

DAMAGE: Final = os.environ["DAMAGE"]


def damage(region: Any, page: int) -> None:
    size = region.layout.page_bytes
    memory = np.frombuffer((ctypes.c_ubyte * size).from_address(region.address + page * size), dtype=np.uint8)
    if DAMAGE == "bit":
        memory[size // 2] ^= 1
    else:  # the checksum in a mock engine's mark, which stands at both ends of a page: what follows is another text
        memory[MARK.size // 2] ^= 1
        memory[-MARK.size // 2] ^= 1


def damaging(landed: Any) -> Any:
    async def wrapper(self: Any, stamp: int, num_pages: int, sent: Sequence[int] = ()) -> Any:
        await asyncio.shield(self._landed)
        for page in sent[-1:]:
            damage(self._transfer._region, page)
        return await landed(self, stamp, num_pages, sent)

    return wrapper


Receiver.landed = damaging(Receiver.landed)  # type: ignore[method-assign]

if __name__ == "__main__":
    run(main(DecodeSettings.read()))
