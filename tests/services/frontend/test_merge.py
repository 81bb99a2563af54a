import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from components.errors import Cancelled
from services.frontend import merge
from services.frontend.merge import merged

pytestmark = pytest.mark.anyio


async def test_what_nobody_reads_is_bounded_and_its_sources_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_HELD", 10)
    made, closed = [], 0

    async def source() -> AsyncGenerator[int, None]:
        nonlocal closed
        try:
            while True:
                made.append(1)
                yield 1
                await asyncio.sleep(0)
        finally:
            closed += 1

    read = []

    async def read_slowly() -> None:
        async with aclosing(merged([source(), source()])) as items:
            async for item in items:
                read.append(item)
                if len(read) == 1:
                    await asyncio.sleep(0.05)  # a client that does not read
                    assert closed, "whoever generates is told at once, not when the client reads on"
                    assert len(made) < 20

    with pytest.raises(Cancelled, match="too slowly"):
        await read_slowly()
    assert closed == 2
    assert len(read) < 20
