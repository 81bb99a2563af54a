"""A bus inside this process: messages are packed and unpacked as on the wire, and handlers answer by subject."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from components.aio import BackgroundTasks
from components.errors import DeadlineExceeded, MeshError, MessageTooLarge, NobodyListens
from components.messaging.call_server import Endpoint
from components.messaging.refusals import Refusals
from components.wire import codec
from components.wire.codec import Struct, pack, unpack
from components.wire.refused import Refused, raised, refusal


class FakeBus:
    """Replaces `components.messaging.bus.Bus`."""

    def __init__(self) -> None:
        self.url = "fake"
        self.refusals = Refusals()
        self.handlers: dict[str, Callable[[Any], Awaitable[Struct]]] = {}
        self.sent: list[tuple[str, Any]] = []  # every message, called or published
        self.frames: list[tuple[str, bytes]] = []
        self.broken: MeshError | None = None  # raised instead of sending
        self.no_responders: dict[str, Callable[[], None]] = {}  # called for a subject without listener
        self.max_bytes = 8 << 20
        self.is_connected = True
        self._tasks = BackgroundTasks()

    def serve(self, subject: str, endpoints: list[Endpoint]) -> None:
        for endpoint in endpoints:
            self.handlers[f"{subject}.{endpoint.name}"] = endpoint.handler

    def of(self, cls: type[Any]) -> list[Any]:
        """Return the sent messages of a class."""
        return [message for _, message in self.sent if isinstance(message, cls)]

    async def call(self, subject: str, request: Struct, *replies: type[Any], timeout_s: float) -> Any:
        handler = self._send(subject, request)
        await asyncio.sleep(0)
        if handler is None:
            raise NobodyListens(f"no process listens on {subject}")
        try:
            answer = await asyncio.wait_for(self._answer(handler, request), timeout_s)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"no answer on {subject} in time") from exc
        received = unpack(pack(answer), *replies, Refused)
        if isinstance(received, Refused):
            raise raised(received)
        return received

    async def publish(self, subject: str, message: Struct) -> None:
        handler = self._send(subject, message)
        if handler is not None:
            self._tasks.start(self._answer(handler, message))

    def since_reconnect_s(self) -> float:
        return 3600.0

    def on_no_responders(self, subject: str, callback: Callable[[], None]) -> str:
        self.no_responders[subject] = callback
        return f"reply.{subject}"

    def check_size(self, subject: str, data: bytes, what: str = "message") -> None:
        if len(data) > self.max_bytes:
            raise MessageTooLarge(f"{what} of {len(data)} bytes for {subject}")

    async def publish_bytes(self, subject: str, data: bytes, reply: str = "") -> None:
        if self.broken is not None:
            raise self.broken
        await asyncio.sleep(0)
        self.frames.append((subject, data))

    def _send(self, subject: str, message: Struct) -> Callable[[Any], Awaitable[Struct]] | None:
        if self.broken is not None:
            raise self.broken
        assert type(message) in codec._tags
        self.sent.append((subject, message))
        return self.handlers.get(subject)

    async def _answer(self, handler: Callable[[Any], Awaitable[Struct]], request: Struct) -> Struct:
        try:
            return await handler(unpack(pack(request), type(request)))
        except MeshError as exc:
            return refusal(exc)
