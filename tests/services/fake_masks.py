"""Stands in for `MaskMaker`."""

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from components.wire.sampling import Constraint


class FakeMasks:
    """Every mask is the result of `ready`, which the test sets."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    @cached_property
    def ready(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def mask_of(self, _constraint: Constraint, token_ids: Sequence[int], _num_generated: int = 0) -> Any:
        self.asked.append(list(token_ids))
        return await asyncio.shield(self.ready)
