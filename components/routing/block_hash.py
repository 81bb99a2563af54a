"""The one block hash: engine cache, KV events and router call it, so that equal prefixes have equal names everywhere."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from components.wire.tokens import pack_tokens

HASH_BYTES: Final = 16


def seed_hash(model: str, lora: str = "", cache_salt: str = "") -> bytes:
    """The parent of a first block: blocks of another model, adapter or tenant never share a name."""
    return blake2b(f"{model}\0{lora}\0{cache_salt}".encode(), digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], page_size: int, seed: bytes) -> list[bytes]:
    """Parent-chained 128-bit hashes of the full pages of `token_ids`: none for a partial last page."""
    packed = memoryview(pack_tokens(token_ids))
    stride = 4 * page_size
    hashes: list[bytes] = []
    parent = seed
    for start in range(0, len(packed) - stride + 1, stride):
        parent = next_block_hash(parent, packed[start : start + stride])
        hashes.append(parent)
    return hashes


def next_block_hash(parent: bytes, packed_page: bytes | memoryview) -> bytes:
    """Hash of one full page (int32[page_size] bytes) that follows the block `parent`."""
    return blake2b(packed_page, digest_size=HASH_BYTES, key=parent).digest()
