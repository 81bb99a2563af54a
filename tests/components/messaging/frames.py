"""Numbered frames from a decode instance to a frontend."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from components.errors import MeshError
from components.messaging.inbox import InStream, StreamInbox
from components.wire.generate import FramesResent, StreamItem
from tests.components.wire.frames import frame_of


@dataclass
class Message:
    data: bytes


async def nothing_lost(_instance_id: str, first: int) -> FramesResent:
    """Answer as an instance that has no other frames."""
    return FramesResent(oldest=first, next=first, made=first)


class Read:
    """A `components.messaging.inbox.Reader` that records a stream."""

    def __init__(self, stream: InStream) -> None:
        self.items: list[StreamItem] = []
        self.error: MeshError | None = None
        self._came = asyncio.Event()
        stream.start(self)

    @property
    def tokens(self) -> list[list[int]]:
        return [item.token_ids for item in self.items]

    def add_tokens(self, item: StreamItem) -> None:
        self.items.append(item)
        self._came.set()

    def fail(self, error: MeshError) -> None:
        assert self.error is None, "it is reported once"
        self.error = error
        self._came.set()

    async def came(self) -> None:
        """Wait for the next item, or for the error."""
        await self._came.wait()
        self._came.clear()


class Numbered:
    """Packs frames to one inbox."""

    def __init__(self, inbox: StreamInbox) -> None:
        self.inbox = inbox
        self._next: Counter[str] = Counter()

    def frame(self, *items: Any, instance_id: str = "d") -> Any:
        number = self._next[instance_id]
        self._next[instance_id] += 1
        return Message(frame_of(instance_id, "e", 1, list(items), number).pack())

    async def deliver(self, *items: Any, instance_id: str = "d") -> None:
        await self.inbox.receive(self.frame(*items, instance_id=instance_id))
