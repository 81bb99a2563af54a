"""Token ids on the wire: little-endian int32 bytes; a list would cost 5 bytes and an object a token."""

import sys
from array import array
from collections.abc import Sequence

from components.errors import MalformedMessage


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """int32[T], little-endian."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Raises: MalformedMessage, if the length is not a multiple of four."""
    num_tokens(data)
    unpacked = array("i")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def num_tokens(data: bytes) -> int:
    """The number of token ids, without unpacking. Raises: MalformedMessage."""
    if len(data) % 4:
        raise MalformedMessage(f"{len(data)} bytes are not whole int32 token ids")
    return len(data) // 4
