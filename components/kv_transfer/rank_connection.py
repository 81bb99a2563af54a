"""Orders from an instance's leader to a follower's transfer end, over a Unix socket."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct as Format
from typing import Final

import msgspec

from components.errors import MeshError, TransferFailed
from components.wire.instances import KvEndpoint, RankEndpoint
from components.wire.layout import KvLayout

LENGTH: Final = Format("<I")
CONNECT_S: Final = 10.0


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open the follower's end over its pool. Answer: its endpoint."""

    setting: str  # as in --kv-transfer
    agent: str
    host: str
    max_request_pages: int
    address: int
    num_pages: int
    device: str
    layout: KvLayout


class Connect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    peer: KvEndpoint


class Disconnect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    agents: list[str]


class Write(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write into all ranks of a connected peer that share heads. Answer: the bytes."""

    agent: str  # of the peer's first rank
    tokens: tuple[int, int]
    source: list[int]
    target: list[int]
    deadline_unix_ms: int  # nothing is posted after it


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make progress for writing peers, or stop it."""

    on: bool


class Hasten(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Sum(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Checksum the tokens of a block table, each head apart. Answer: the sums."""

    pages: list[int]
    tokens: tuple[int, int]
    peer_page_size: int


class CatchUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


Order = Open | Connect | Disconnect | Write | Sum | Receive | Hasten | CatchUp


class Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    error: str = ""
    num_bytes: int = 0
    endpoint: RankEndpoint | None = None
    sums: list[list[int]] = []  # by page of the larger size, then by head


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    number: int
    order: Order


_encoder: Final = msgspec.msgpack.Encoder()
orders: Final = msgspec.msgpack.Decoder(Numbered)
answers: Final = msgspec.msgpack.Decoder(Answer)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, message: Numbered | Answer) -> None:
    data = _encoder.encode(message)
    writer.write(LENGTH.pack(len(data)) + data)


class RankConnection:
    """The leader's side of one follower."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._rank = rank
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._writes: set[int] = set()  # numbers of unanswered write orders
        self._count = 0
        self._is_over = False
        self._reading = asyncio.create_task(self._read(reader), name=f"rank {rank}")

    @classmethod
    async def open(cls, rank: int, path: str) -> "RankConnection":
        """Raises: TransferFailed."""
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(path)
        except OSError as exc:
            raise TransferFailed(f"rank {rank} does not answer: {exc}") from exc
        return cls(rank, reader, writer)

    def ask(self, order: Order) -> asyncio.Future[Answer]:
        """Returns: a future of the answer; TransferFailed if the order failed, or the follower has ended.

        If the follower ends during a write, the write's future stays open until `close`: its last bytes may still land. This
        instance then ends, too; until then it must not report the transfer as over.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._is_over:
            future.set_exception(self._gone())
            return future
        self._count += 1
        self._waiting[self._count] = future
        if isinstance(order, Write):
            self._writes.add(self._count)
        write_frame(self._writer, Numbered(self._count, order))
        return future

    async def moved(self, order: Write) -> int:
        return (await self.ask(order)).num_bytes

    async def close(self) -> None:
        self._writer.transport.abort()  # a follower that reads nothing would block a close
        with suppress(OSError):
            await self._writer.wait_closed()
        await self._reading
        self._give_up(list(self._waiting))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read_frame(reader)) is not None:
            answer = answers.decode(frame)
            future = self._waiting.pop(answer.number, None)
            self._writes.discard(answer.number)
            if future is None or future.done():
                continue
            if answer.error:
                future.set_exception(TransferFailed(f"rank {self._rank}: {answer.error}"))
            else:
                future.set_result(answer)
        self._is_over = True
        self._give_up([number for number in self._waiting if number not in self._writes])

    def _give_up(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            future = self._waiting.pop(number)
            if not future.done():
                future.set_exception(self._gone())

    def _gone(self) -> MeshError:
        return TransferFailed(f"rank {self._rank} of this instance has ended")


def rank_endpoint(pid: int, endpoint: KvEndpoint) -> RankEndpoint:
    return RankEndpoint(
        pid=pid,
        device=endpoint.device,
        base_address=endpoint.base_address,
        agent=endpoint.agent,
        agent_metadata=endpoint.agent_metadata,
        aux_address=endpoint.aux_address,
    )
