"""NATS inside this process: replaces `nats.aio.client.Client` below `Bus`, so that faults can change every message.

Messages of one sender on one subject arrive in order. A call to a subject without subscriber fails at once. Messages to a
stopped process wait; a dead process has no subscriptions.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any, Final, Protocol

from nats.aio.msg import Msg

from components.messaging.replies import NO_RESPONDERS, STATUS
from tests.faults.virtual_loop import Process, current_process

LATENCY_S: Final = 0.0002
NEXT_S: Final = 1e-7  # after the message before: timers of one moment have no order


@dataclass(slots=True)
class Sent:
    """A message on its way."""

    kind: str  # its tag, or "frame"
    subject: str
    reply: str
    data: bytes
    headers: dict[str, str]
    sender: Process


@dataclass(frozen=True, slots=True)
class Copy:
    """One delivery of it."""

    data: bytes
    delay_s: float = 0.0
    to_sender: bool = False  # an answer instead of a delivery


class Meddler(Protocol):
    """Injects faults into messages."""

    def message(self, sent: Sent) -> list[Copy] | None:
        """Return what is delivered; None: the message unchanged. Raises: an error of the sender's client."""


@dataclass
class Subscription:
    """Like a subscription of nats-py: it handles one message at a time."""

    server: "MemoryNats"
    subject: str
    process: Process
    callback: Callable[[Msg], Awaitable[None]]
    queue: "asyncio.Queue[Msg]" = field(default_factory=asyncio.Queue)
    task: "asyncio.Task[None] | None" = None

    async def pump(self) -> None:
        while True:
            await self.callback(await self.queue.get())

    async def unsubscribe(self) -> None:
        self.server.unsubscribe(self)
        if self.task is not None:
            self.task.cancel()

    async def drain(self) -> None:
        await self.unsubscribe()

    def matches(self, subject: str) -> bool:
        return _fits(self.subject, subject)


@lru_cache(maxsize=1024)
def _fits(pattern: str, subject: str) -> bool:
    mine, theirs = pattern.split("."), subject.split(".")
    if mine[-1] == ">":
        mine, theirs = mine[:-1], theirs[: len(mine) - 1]
    return len(mine) == len(theirs) and all(a in ("*", b) for a, b in zip(mine, theirs, strict=True))


class MemoryNats:
    def __init__(self, meddler: Meddler, random: Random) -> None:
        self._exact: dict[str, list[Subscription]] = {}  # by subject
        self._wild: list[Subscription] = []
        self.inboxes = count()
        self.away_until_s = 0.0
        self.outages = 0
        self._meddler = meddler
        self._random = random
        self._context = contextvars.Context()
        self._last: dict[tuple[str, str], float] = {}  # arrival of the latest message, by sender and subject

    @property
    def is_away(self) -> bool:
        return asyncio.get_running_loop().time() < self.away_until_s

    def go_away(self, until_s: float) -> None:
        self.away_until_s = until_s
        self.outages += 1

    def listeners(self, subject: str) -> list[Subscription]:
        matching = [*self._exact.get(subject, ()), *(s for s in self._wild if s.matches(subject))]
        return [s for s in matching if not s.process.is_dead]

    def subscribe(self, subscription: Subscription) -> None:
        self._like(subscription).append(subscription)

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription in (like := self._like(subscription)):
            like.remove(subscription)

    def _like(self, subscription: Subscription) -> list[Subscription]:
        is_wild = subscription.subject.endswith(".>") or "*" in subscription.subject
        return self._wild if is_wild else self._exact.setdefault(subscription.subject, [])

    def send(self, sent: Sent) -> None:
        """Raises: the error that a fault injects."""
        loop = asyncio.get_running_loop()
        if sent.sender.is_dead:
            return
        copies = self._meddler.message(sent)
        if copies is None:
            copies = [Copy(sent.data)]
        outage_s = 0.0
        if self.is_away:  # nats-py keeps its unsent messages, the server loses its own
            if self._random.random() < 0.5:
                return
            outage_s = self.away_until_s - loop.time()
        for copy in copies:
            subject = sent.reply if copy.to_sender else sent.subject
            arrival = loop.time() + outage_s + copy.delay_s + LATENCY_S * (1 + self._random.random())
            arrival = max(arrival, self._last.get((sent.sender.name, subject), 0.0) + NEXT_S)
            self._last[sent.sender.name, subject] = arrival
            reply = "" if copy.to_sender else sent.reply
            loop.call_at(arrival, self._arrive, subject, reply, copy.data, sent.headers, context=self._context)

    def reply_no_responders(self, reply: str) -> None:
        at = asyncio.get_running_loop().time() + 2 * LATENCY_S
        headers = {STATUS: NO_RESPONDERS}
        asyncio.get_running_loop().call_at(at, self._arrive, reply, "", b"", headers, context=self._context)

    def _arrive(self, subject: str, reply: str, data: bytes, headers: dict[str, str]) -> None:
        for subscription in self.listeners(subject):
            client = MemoryClient(self, subscription.process)
            message = Msg(_client=client, subject=subject, reply=reply, data=data, headers=headers)
            subscription.queue.put_nowait(message)


class _Ids:
    """For `nats.micro`."""

    _numbers = count()

    def next(self) -> bytes:
        return f"{next(self._numbers)}".encode()


class MemoryClient:
    """The parts of a connection that `Bus` and `nats.micro` use."""

    max_payload = 8 << 20
    _pings_outstanding = 0
    _nuid = _Ids()

    def __init__(self, server: MemoryNats, process: Process) -> None:
        self._server = server
        self._process = process

    @property
    def is_connected(self) -> bool:
        return not self._server.is_away and not self._process.is_dead

    @property
    def stats(self) -> dict[str, int]:
        return {"reconnects": self._server.outages - self._server.is_away}

    async def publish(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self._server.send(Sent(kind_of(data), subject, reply, data, headers or {}, self._process))
        if reply and not self._server.listeners(subject) and not self._server.is_away:
            self._server.reply_no_responders(reply)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._server.inboxes)}"

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None, **_limits: Any
    ) -> Subscription:
        assert cb is not None
        assert current_process() is self._process
        subscription = Subscription(self._server, subject, self._process, cb)
        subscription.task = asyncio.create_task(subscription.pump(), name=f"{self._process.name} reads {subject}")
        self._server.subscribe(subscription)
        return subscription

    async def flush(self, timeout: float = 10) -> None:
        await asyncio.sleep(2 * LATENCY_S)


def kind_of(data: bytes) -> str:
    """Return a message's tag; "frame" or "kv-events" for those without one."""
    if data[:1] == b"\x96":
        return "kv-events"
    if data[:1] != b"\x92":
        return "frame"
    head = data[1]
    return data[3 : 3 + data[2]].decode() if head == 0xD9 else data[2 : 2 + (head & 0x1F)].decode()
