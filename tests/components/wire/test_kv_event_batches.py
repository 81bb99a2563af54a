"""Batches of KV events arrive as they were sent, or are refused; 16 bytes a block."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import MalformedMessage
from components.wire.kv_events import KvEventBatch, pack_batch, unpack_batch, unpack_hashes

hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4)
batches = st.builds(KvEventBatch, st.text(max_size=9), st.text(max_size=9), st.integers(0, 2**63), hashes, hashes)


@given(batch=batches)
def test_a_batch_arrives_as_it_was_sent(batch: KvEventBatch) -> None:
    assert unpack_batch(pack_batch(batch)) == batch


def test_a_block_costs_its_hash() -> None:
    empty = len(pack_batch(KvEventBatch("0123abcd", "0123abcd", 70_000, [], [])))
    full = len(pack_batch(KvEventBatch("0123abcd", "0123abcd", 70_000, [bytes(16)] * 8192, [])))
    assert empty < 40
    assert full - empty - 8192 * 16 < 8


@pytest.mark.parametrize(
    "value",
    [
        None,
        [2, "i", "e", 1, b"", b""],
        [1, "i", "e", 1, b""],
        [1, 5, "e", 1, b"", b""],
        [1, "i", "e", "1", b"", b""],
        [1, "i", "e", True, b"", b""],
        [1, "i", "e", 1, b"x" * 17, b""],
        [1, "i", "e", 1, b"", "x" * 16],
    ],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_batch(msgpack.packb(value))


@given(data=st.binary(max_size=64))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_batch(data)


def test_half_a_hash_in_a_dump_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        unpack_hashes(bytes(24))
