"""Frames from a decode instance to a frontend, numbered as it numbers them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from components.messaging.inbox import StreamInbox
from components.wire.generate import FramesResent, TokenFrame
from tests.components.wire.frames import pack_frame


@dataclass
class Message:
    data: bytes


async def nothing_lost(_instance_id: str, first: int) -> FramesResent:
    """The answer of an instance that has made no other frames."""
    return FramesResent(oldest=first, next=first, made=first)


class Numbered:
    """Packs frames to one inbox."""

    def __init__(self, inbox: StreamInbox) -> None:
        self.inbox = inbox
        self._next: Counter[str] = Counter()

    def frame(self, *items: Any, instance_id: str = "d") -> Any:
        number = self._next[instance_id]
        self._next[instance_id] += 1
        return Message(pack_frame(TokenFrame(instance_id, "e", 1, list(items), number)))

    async def deliver(self, *items: Any, instance_id: str = "d") -> None:
        await self.inbox.receive(self.frame(*items, instance_id=instance_id))
