"""The faults of a run, and `Chaos`, which injects them. A fault prints as the code that makes it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum, auto
from typing import Any, Final
from unittest import mock

import msgpack
import nats.errors

from components import lifecycle
from components.errors import BY_NAME
from components.messaging.clocks import now_ms
from components.wire import codec
from components.wire.codec import pack, unpack, unpack_plain
from components.wire.generate import unpack_frame
from components.wire.refused import refusal
from tests.faults.memory_nats import Copy, Sent
from tests.faults.memory_transfer import WriteFault
from tests.faults.virtual_loop import Process

LAST_FRAME: Final = "last-frame"  # one with the end of a stream
DECODE: Final = logging.getLogger("services.decode")  # of all its modules


class Do(StrEnum):
    DROP = auto()
    DELAY = auto()  # by `amount` seconds
    DUPLICATE = auto()  # again after `amount` seconds
    GARBLE = auto()  # truncated
    ALTER = auto()  # `field` becomes another value of its type
    REFUSE = auto()  # answered with the error `field`, and not delivered
    UNSENT = auto()  # the sender's client raises OutboundBufferLimitError
    NOBODY = auto()  # the sender's client raises NoRespondersError
    WRITE_FAILS = auto()
    WRITE_LATE = auto()  # by `amount` seconds
    WRITE_SILENT = auto()  # its notification is lost
    WRITE_STAMP = auto()  # the aux slot carries another stamp
    WRITE_CORRUPT = auto()  # one bit is flipped
    KILL = auto()  # for good; another instance starts later
    STOP = auto()  # SIGSTOP, and SIGCONT after `amount` seconds
    LEASE = auto()  # etcd drops its lease
    DRAIN = auto()  # SIGTERM; another instance starts later
    NATS_AWAY = auto()  # for `amount` seconds
    ETCD_AWAY = auto()  # for `amount` seconds
    CLIENT_GONE = auto()  # client number `which` of those that wait
    HANG = auto()  # for `amount` seconds, in which its lease is renewed
    STEPS_FAIL = auto()  # all further steps of its engine; the process ends, and another instance starts
    RANK_LOST = auto()  # kill -9 of a follower; its process ends, and another instance starts
    CUT_OFF = auto()  # from etcd, for `amount` seconds
    CLIENT_STALLS = auto()  # it reads nothing for `amount` seconds


OF_MESSAGES: Final = (Do.DROP, Do.DELAY, Do.DUPLICATE, Do.GARBLE, Do.ALTER, Do.REFUSE, Do.UNSENT, Do.NOBODY)
OF_WRITES: Final = (Do.WRITE_FAILS, Do.WRITE_LATE, Do.WRITE_SILENT, Do.WRITE_STAMP, Do.WRITE_CORRUPT)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at the `nth` event `at`:

    `message <tag>`, `message frame`, `message last-frame`, `write pages`, `write aux`, `<lifecycle> <state>` such as
    `inbound transfer`, `<lifecycle> <state> to <state>`, or `time <seconds>`.
    """

    do: Do
    at: str
    nth: int = 1
    count: int = 1  # of messages or writes in a row
    amount: float = 0.0
    field: str = ""
    role: str = ""  # of the process
    which: int = 0  # of the live processes of that role
    after_s: float = 0.0  # since that event

    def __str__(self) -> str:
        facts = [f"Do.{self.do.name}", repr(self.at)]
        named = ((f.name, getattr(self, f.name), f.default) for f in fields(self)[2:])
        facts += [f"{name}={value!r}" for name, value, default in named if value != default]
        return f"Fault({', '.join(facts)})"


class Chaos:
    """Injects a schedule. `act`: faults of processes, servers and clients; `requested`: called for each request to decode."""

    def __init__(
        self,
        schedule: list[Fault],
        act: Callable[[Fault], bool],
        requested: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self.fired: list[Fault] = []
        self.trace: list[str] = []
        self.recovering = False  # no further faults
        self.is_over = False  # nor entries of the trace
        self._schedule = schedule
        self._act = act
        self._requested = requested
        self._sees_ends = any(fault.at == f"message {LAST_FRAME}" for fault in schedule)
        self._seen: Counter[str] = Counter()

    def start(self) -> None:
        for fault in self._schedule:
            if fault.at.startswith("time "):
                self._later(fault, float(fault.at.removeprefix("time ")))

    def note(self, line: str) -> None:
        """Add to the trace that a failure prints."""
        if not self.is_over:
            self.trace.append(f"{asyncio.get_running_loop().time():9.4f} {line}")

    def message(self, sent: Sent) -> list[Copy] | None:
        if sent.kind not in ("heartbeat.v1", "frame"):
            self.note(f"{sent.sender.name} → {sent.subject}: {sent.kind}")
        if sent.kind.startswith("generate.v"):
            self._requested(unpack_plain(sent.data)[1]["request_id"], sent.subject.split(".")[-2])
        due = self._due(f"message {sent.kind}", OF_MESSAGES)
        if self._sees_ends and sent.kind == "frame" and any(item.finish for item in unpack_frame(sent.data).items):
            due += self._due(f"message {LAST_FRAME}", OF_MESSAGES)
        for fault in due:
            self._fire(fault)
            return _meddled(fault, sent)
        return None

    def write(self, agent: str, kind: str) -> WriteFault:
        self.note(f"write of {kind} to {agent}")
        for fault in self._due(f"write {kind}", OF_WRITES):
            self._fire(fault)
            return WriteFault(
                delay_s=fault.amount if fault.do is Do.WRITE_LATE else 0.0,
                fails=fault.do is Do.WRITE_FAILS,
                is_silent=fault.do is Do.WRITE_SILENT,
                stamp=int(fault.do is Do.WRITE_STAMP),
                corrupts=fault.do is Do.WRITE_CORRUPT,
            )
        return WriteFault()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe all transitions of lifecycles, and decode's warnings."""
        warnings = _Warnings(self.note)
        DECODE.addHandler(warnings)
        try:
            with mock.patch.object(lifecycle, "log", _Moves(self._moved)):
                yield
        finally:
            DECODE.removeHandler(warnings)

    def _moved(self, of: str, was: str, now: str) -> None:
        if not of.startswith("request "):
            self.note(f"{of} is {now}")
        lifecycle_name = of.partition(" ")[0]
        self._due(f"{lifecycle_name} {now}", ())
        self._due(f"{lifecycle_name} {was} to {now}", ())

    def _due(self, event: str, kinds: tuple[Do, ...]) -> list[Fault]:
        """Count the event. Return its faults of `kinds`, and schedule its faults of processes, servers and clients."""
        if self.recovering:
            return []
        self._seen[event] += 1
        seen = self._seen[event]
        due = [f for f in self._schedule if f.at == event and f.nth <= seen < f.nth + f.count]
        for fault in due:
            if fault.do not in OF_MESSAGES + OF_WRITES:
                self._later(fault, fault.after_s)
        return [f for f in due if f.do in kinds]

    def _later(self, fault: Fault, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + delay_s, self._do, fault, context=Process("chaos").context())

    def _do(self, fault: Fault) -> None:
        if not self.recovering and self._act(fault):
            self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        self.fired.append(fault)
        self.note(f"!! {fault}")


class _Moves:
    """Replaces the logger of the lifecycles: log records would be slow."""

    def __init__(self, moved: Callable[[str, str, str], None]) -> None:
        self._moved = moved

    def isEnabledFor(self, _level: int) -> bool:
        return True

    def debug(self, _message: str, *, extra: dict[str, str]) -> None:
        self._moved(extra["of"], extra["was"], extra["is"])


class _Warnings(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"{record.getMessage()}: {getattr(record, 'cause', '')}")


def _meddled(fault: Fault, sent: Sent) -> list[Copy]:
    match fault.do:
        case Do.DROP:
            return []
        case Do.DELAY:
            return [Copy(sent.data, fault.amount)]
        case Do.DUPLICATE:
            return [Copy(sent.data), Copy(sent.data, fault.amount)]
        case Do.GARBLE:
            return [Copy(sent.data[: len(sent.data) // 2])]
        case Do.ALTER:
            return [Copy(_altered(sent.data, fault.field))]
        case Do.REFUSE:
            refused = pack(refusal(BY_NAME[fault.field]("injected")))
            return [Copy(refused, to_sender=True)] if sent.reply else [Copy(refused)]
        case Do.UNSENT:
            raise nats.errors.OutboundBufferLimitError
        case _:
            raise nats.errors.NoRespondersError


def _altered(data: bytes, name: str) -> bytes:
    tag, fields = unpack_plain(data)
    value = getattr(unpack(data, codec._by_tag[tag]), name)  # `fields` lacks defaults
    fields[name] = _other(value, name)
    packed: bytes = msgpack.packb([tag, fields], use_bin_type=True)
    return packed


def _other(value: Any, name: str) -> Any:
    if name == "deadline_unix_ms":
        return now_ms() - 1
    match value:
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return value[:-1]
        case _:
            return None
