"""Token ids as int32[T] bytes, little-endian."""

import sys
from array import array
from collections.abc import Sequence

from components.errors import MalformedMessage


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    num_tokens(data)
    unpacked = array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def num_tokens(data: bytes) -> int:
    if len(data) % 4:
        raise MalformedMessage(f"{len(data)} bytes are not whole int32 token ids")
    return len(data) // 4
