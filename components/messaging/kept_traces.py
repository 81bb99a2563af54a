"""Announce kept traces: from the frontend with the root to all processes that hold spans."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from nats.aio.msg import Msg

from components.aio import background
from components.errors import MeshError
from components.messaging.bus import Bus
from components.telemetry.held_traces import HeldTraces
from components.wire.codec import unpack
from components.wire.traces import KeepTraces

log = logging.getLogger(__name__)

EVERY_S: Final = 0.1
ID_BYTES: Final = 16
MAX_IDS: Final = 1000  # in one message, and waiting


def subject(namespace: str) -> str:
    return f"{namespace}.traces.keep"


@asynccontextmanager
async def announce_kept(bus: Bus, namespace: str, held: HeldTraces) -> AsyncIterator[None]:
    ids: list[int] = []

    async def publish() -> None:
        if not ids:
            return
        batch = [trace_id.to_bytes(ID_BYTES, "big") for trace_id in ids[:MAX_IDS]]
        ids.clear()
        try:
            await bus.publish(subject(namespace), KeepTraces(trace_ids=b"".join(batch)))
        except MeshError as exc:  # these traces will lack other processes' spans
            log.warning("kept traces not announced", extra={"count": len(batch), "cause": exc.message})

    async def run() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await publish()

    held.announce_to(ids.append)
    try:
        async with background(run(), "announce-kept-traces"):
            yield
    finally:
        held.announce_to(None)
        await publish()  # requests that failed while this process was stopping


@asynccontextmanager
async def follow_kept(bus: Bus, namespace: str, held: HeldTraces) -> AsyncIterator[None]:
    """Export held spans of the traces that a frontend keeps."""

    async def receive(message: Msg) -> None:
        try:
            ids = unpack(message.data, KeepTraces).trace_ids
        except MeshError as exc:
            bus.refusals.count("traces.keep", exc)
            return
        held.keep(int.from_bytes(ids[at : at + ID_BYTES], "big") for at in range(0, len(ids), ID_BYTES))

    async with bus.subscription(subject(namespace), receive):
        yield
