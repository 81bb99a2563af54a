"""Prompts that prefill computes: they are sent again if decode computed some because a process stalled."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar
from uuid import uuid4

import httpx

from tests.mesh.harness import Client
from tests.waiting import PATIENCE_S

T = TypeVar("T")

TRIES: Final = 3
ON_DECODE: Final = "kvmesh_prompts_computed_on_decode_total"


async def through_prefill(client: Client, ask: Callable[[str], Awaitable[T]]) -> T:
    """Call `ask` with new salts until prefill computes all its prompts, and return its result.

    Decode rightly computes a prompt itself while prefill or bootstrap does not answer for 1.5 s. A busy machine may stall
    a process for that long.
    """
    tries: list[Counter[str]] = []
    while len(tries) < TRIES:
        if tries:
            await _until_prefill_is_used(client)
        before = await _computed_on_decode(client)
        found = await ask(uuid4().hex)
        tries.append(await _computed_on_decode(client) - before)
        if not tries[-1]:
            return found
    raise AssertionError(f"decode computed prompts itself, in each of {TRIES} tries: {tries}")


async def _until_prefill_is_used(client: Client) -> None:
    """Send one prompt at a time, until it has closed the circuit breaker."""
    model = client.book.of_role("decode")[0].model
    with suppress(TimeoutError):  # the next try shows the reason
        async with asyncio.timeout(PATIENCE_S):
            while True:
                before = await _computed_on_decode(client)
                await client.generate(range(3, 103), 1, model=model, salt=uuid4().hex)
                if not await _computed_on_decode(client) - before:
                    return
                await asyncio.sleep(0.5)


async def _computed_on_decode(client: Client) -> Counter[str]:
    """Count the prompts that decode instances have computed, by instance and reason."""
    found: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        for record in client.book.of_role("decode"):
            for line in (await http.get(f"{record.http}/metrics")).text.splitlines():
                if line.startswith(ON_DECODE):
                    labels, _, value = line.rpartition(" ")
                    found[f"{record.instance_id} {labels.removeprefix(ON_DECODE)}"] = int(float(value))
    return found
