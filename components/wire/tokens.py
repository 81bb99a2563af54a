"""Token ids on the wire: little-endian int32 bytes, never a list (a list costs 5 bytes and one object a token)."""

import sys
from array import array
from collections.abc import Sequence

from components.errors import MalformedMessage


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """int32[T] little-endian bytes of `token_ids`."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The token ids in `data`. Raises: MalformedMessage, when the length is not a multiple of four."""
    num_tokens(data)
    unpacked = array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def num_tokens(data: bytes) -> int:
    """How many token ids are in `data`, without unpacking them. Raises: MalformedMessage, as `unpack_tokens`."""
    if len(data) % 4:
        raise MalformedMessage(f"{len(data)} bytes are not whole int32 token ids")
    return len(data) // 4
