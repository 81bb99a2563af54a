"""worker → routers: changes of its prefix cache on `<subject>.kv_events`.

A router that misses a batch fetches a dump on `.kv_dump`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgpack

from components.errors import MalformedMessage
from components.wire.codec import Struct, message, unpack_plain
from components.wire.tokens import HASH_BYTES

BATCH_VERSION: Final = 1
MAX_BATCH_BLOCKS: Final = 8192  # 128 KiB
DUMP_PART_BLOCKS: Final = 16_384  # 256 KiB; NATS's default limit is 1 MB


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """An empty batch shows that none was lost."""

    instance_id: str
    epoch: str
    number: int
    stored: list[bytes]
    removed: list[bytes]


def pack_batch(batch: KvEventBatch) -> bytes:
    # Checked by hand, because there may be thousands a second.
    fields = (
        BATCH_VERSION,
        batch.instance_id,
        batch.epoch,
        batch.number,
        pack_hashes(batch.stored),
        pack_hashes(batch.removed),
    )
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def unpack_batch(data: bytes) -> KvEventBatch:
    value = unpack_plain(data)
    if not (isinstance(value, list) and len(value) == 6 and value[0] == BATCH_VERSION):
        raise MalformedMessage("not a batch of KV events of version 1")
    _, instance_id, epoch, number, stored, removed = value
    if not (isinstance(instance_id, str) and isinstance(epoch, str) and type(number) is int):
        raise MalformedMessage("KV events: bad header")
    return KvEventBatch(instance_id, epoch, number, unpack_hashes(stored), unpack_hashes(removed))


def pack_hashes(blocks: Iterable[bytes]) -> bytes:
    return b"".join(blocks)


def unpack_hashes(data: object) -> list[bytes]:
    if not isinstance(data, bytes) or len(data) % HASH_BYTES:
        raise MalformedMessage("not whole block hashes")
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


@message("kv-dump-fetch.v1")
class FetchKvDump(Struct):
    epoch: str
    dump_id: str = ""  # from the first answer; "": begin
    first: int = 0  # block
    have: int | None = None  # the router's number: if current, no blocks are sent


@message("kv-dump-part.v1")
class KvDumpPart(Struct):
    """The cache after batch `number`."""

    number: int
    blocks: bytes = b""
    num_blocks: int = 0  # in the dump
    dump_id: str = ""
    unchanged: bool = False  # `have` is current
