"""Token ids as int32[T] bytes, little-endian, and the hashes of their blocks."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, overload

from components.errors import MalformedMessage

HASH_BYTES: Final = 16
PREFIX_TOKENS: Final = 256


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


def seed_hash(model: str, lora: str = "", cache_salt: str = "") -> bytes:
    """Models, adapters and tenants share no hashes."""
    return blake2b(f"{model}\0{lora}\0{cache_salt}".encode(), digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], page_size: int, seed: bytes) -> list[bytes]:
    return list(_chain(pack_tokens(token_ids), page_size, seed))


def _chain(tokens: bytes, page_size: int, parent: bytes) -> Iterator[bytes]:
    packed, stride = memoryview(tokens), 4 * page_size
    for start in range(0, len(packed) - stride + 1, stride):
        parent = blake2b(packed[start : start + stride], digest_size=HASH_BYTES, key=parent).digest()
        yield parent


class BlockHashes(Sequence[bytes]):
    """Hashes of full pages, each computed once, on demand."""

    __slots__ = ("_len", "_made", "_rest")

    def __init__(self, tokens: bytes, page_size: int, seed: bytes) -> None:
        """`tokens`: int32[T] bytes."""
        self._made: list[bytes] = []
        self._rest = _chain(tokens, page_size, seed)
        self._len = len(tokens) // (4 * page_size)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[bytes]:
        made, at = self._made, 0
        while at < self._len:
            if at == len(made):
                made.append(next(self._rest))
            yield made[at]
            at += 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        self._made.extend(self._rest)
        return self._made[index]


class PromptBlocks:
    def __init__(self, tokens: bytes, seed: bytes) -> None:
        self.num_tokens = num_tokens(tokens)
        self._tokens = tokens
        self._seed = seed
        self._by_page_size: dict[int, BlockHashes] = {}

    def __call__(self, page_size: int) -> BlockHashes:
        blocks = self._by_page_size.get(page_size)
        if blocks is None:
            blocks = self._by_page_size[page_size] = BlockHashes(self._tokens, page_size, self._seed)
        return blocks

    def prefix(self) -> bytes:
        return blake2b(self._tokens[: 4 * PREFIX_TOKENS], digest_size=HASH_BYTES, key=self._seed).digest()
