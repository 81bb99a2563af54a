"""worker → routers: which blocks its prefix cache gained and lost, numbered, and all it holds for whoever needs that.

Batches go out on `<subject>.kv_events`. Numbers count up by one within an epoch, so a missing batch is seen; whoever misses
one asks on `<subject>.kv_dump` for everything, and goes on from the number that the answer names. A block hash names its whole
prefix and the page size is the instance record's, so hashes are all that travels: 16 bytes a block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgpack

from components.errors import MalformedMessage
from components.routing.block_hash import HASH_BYTES
from components.wire.codec import Struct, message, unpack_plain

BATCH_VERSION: Final = 1
MAX_BATCH_BLOCKS: Final = 8192  # 128 KiB, and a few milliseconds of a router's time
DUMP_PART_BLOCKS: Final = 16_384  # 256 KiB: a NATS server takes 1 MB unless it is told to take more


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """The net change since the batch before it: no block stands in it twice. Both empty: nothing was lost so far."""

    instance_id: str
    epoch: str
    number: int
    stored: list[bytes]
    removed: list[bytes]


def pack_batch(batch: KvEventBatch) -> bytes:
    """A plain msgpack array, checked by hand on the other side: there may be thousands a second."""
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
    """The batch in `data`. Raises: MalformedMessage."""
    value = unpack_plain(data)
    if not (isinstance(value, list) and len(value) == 6 and value[0] == BATCH_VERSION):
        raise MalformedMessage("not a batch of KV events of version 1")
    _, instance_id, epoch, number, stored, removed = value
    if not (isinstance(instance_id, str) and isinstance(epoch, str) and type(number) is int):
        raise MalformedMessage("KV events: bad header")
    return KvEventBatch(instance_id, epoch, number, unpack_hashes(stored), unpack_hashes(removed))


def pack_hashes(blocks: Iterable[bytes]) -> bytes:
    """Block hashes, one after the other."""
    return b"".join(blocks)


def unpack_hashes(data: object) -> list[bytes]:
    """The hashes in `data`. Raises: MalformedMessage, when these are not whole hashes."""
    if not isinstance(data, bytes) or len(data) % HASH_BYTES:
        raise MalformedMessage("not whole block hashes")
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


@message("kv-dump-fetch.v1")
class FetchKvDump(Struct):
    """router → worker `<subject>.kv_dump`; answered by KvDumpPart, or refused: another epoch, too many dumps at once."""

    epoch: str
    dump_id: str = ""  # of the first answer; "": begin
    first: int = 0  # block wanted
    have: int | None = None  # number that the asker stands at: nothing is sent when nothing has happened since


@message("kv-dump-part.v1")
class KvDumpPart(Struct):
    """worker → router: what was cached right after the batch `number`, the same for all parts of a dump."""

    number: int
    blocks: bytes = b""  # hashes, from `first` on
    num_blocks: int = 0  # of the whole dump
    dump_id: str = ""
    unchanged: bool = False  # `number` is the one that the asker has
