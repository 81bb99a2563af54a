"""`services.decode` that damages received KV before it is verified; environment DAMAGE: "bit" or "mark"."""

import asyncio
import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from components.process import run
from engine.mock.marked_pages import MARK
from services.decode.__main__ import main
from services.decode.config import DecodeSettings
from services.decode.inbound import InboundTransfer

DAMAGE: Final = os.environ["DAMAGE"]


def damage(region: Any, page: int) -> None:
    size = region.layout.page_bytes
    memory = np.frombuffer((ctypes.c_ubyte * size).from_address(region.address + page * size), dtype=np.uint8)
    if DAMAGE == "bit":
        memory[size // 2] ^= 1
    else:  # checksums in the mock's marks, in the first and last stripe of each head: they change the tokens
        stripe = region.layout.page_size * region.layout.row_bytes
        head = region.layout.layers * 2 * stripe
        for first in range(0, size, head):
            memory[first + MARK.size // 2] ^= 1
            memory[first + head - stripe + MARK.size // 2] ^= 1


def damaging(landed: Any) -> Any:
    async def wrapper(self: Any, pages: Sequence[int], tokens: range) -> Any:
        await asyncio.shield(self._landed)
        if tokens:
            damage(self._transfer._region, pages[-1])
        return await landed(self, pages, tokens)

    return wrapper


InboundTransfer.landed = damaging(InboundTransfer.landed)  # type: ignore[method-assign]

if __name__ == "__main__":
    run(main(DecodeSettings.read()))
