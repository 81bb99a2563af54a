"""NIXL between instances of several ranks: real agents, an end and a pool for each rank."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from components.errors import DeadlineExceeded, TransferFailed
from components.kv_transfer import backend, nixl_transfer
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.multi_rank_transfer import Opened, open_transfer
from components.kv_transfer.rank_connection import Write
from components.kv_transfer.rank_end import serve_rank
from components.kv_transfer.writes import Copy
from components.wire.layout import KvLayout, of_shard
from tests.components.kv_transfer.nixl_peer import LATER_MS
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

WHOLE = KvLayout(model="m", dtype="float16", page_size=16, layers=2, kv_heads=4, head_dim=8)
PAGES = 24
TOKENS = 75
Pool = NDArray[np.uint8]  # [pages, heads, layers, 2, page_size, row]


@dataclass(frozen=True)
class Place:
    device: str
    address: int
    socket_path: str


@dataclass(frozen=True)
class Region:
    address: int
    num_pages: int
    layout: KvLayout
    device: str = "cpu"
    followers: Sequence[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Instance:
    opened: Opened
    pools: list[Pool]  # by rank

    def head(self, layout: KvLayout, rank: int, head: int) -> Pool:
        return self.pools[rank][:, head - of_shard(layout, rank, layout.shards).heads.start]


def pool(layout: KvLayout, whole: Pool | None) -> Pool:
    """Return a rank's heads of `whole`; zeros if it is None."""
    shape = (PAGES, layout.num_heads, layout.layers, 2, layout.page_size, layout.row_bytes)
    return np.zeros(shape, np.uint8) if whole is None else np.ascontiguousarray(whole[:, layout.heads])


@asynccontextmanager
async def instance(
    home: Path, name: str, ranks: int, page_size: int, whole: Pool | None = None
) -> AsyncIterator[Instance]:
    layouts = [of_shard(replace(WHOLE, page_size=page_size), rank, ranks) for rank in range(ranks)]
    pools = [pool(layout, whole) for layout in layouts]
    places = []
    for rank in range(1, ranks):
        socket_path = home / f"{name}-{rank}"
        serve_rank(socket_path)
        places.append(Place("cpu", pools[rank].ctypes.data, str(socket_path)))
    region = Region(pools[0].ctypes.data, PAGES, layouts[0], followers=places)
    async with open_transfer("nixl", region, name, "127.0.0.1", 0) as opened:
        yield Instance(opened, pools)


async def sums(side: Instance, layouts: Sequence[KvLayout], table: list[int], peer_shards: int) -> list[int]:
    """Return the sums of all tokens, of prefill or of every copy on decode."""
    own = Region(side.pools[0].ctypes.data, PAGES, side.opened.transfer.endpoint.layout)
    checksums = PageChecksums(own, side.opened.writes.connections)
    one = checksums.of_transfer(layouts[1].page_size, peer_shards, every_copy=True)
    for tokens in (range(32), range(32, TOKENS)):
        await one.add(table, tokens)
    return await one.total()


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        ((1, 2), (16, 16)),
        ((2, 1), (16, 16)),
        ((2, 2), (16, 16)),
        ((4, 2), (16, 32)),
        ((2, 8), (32, 16)),
        ((3, 2), (16, 16)),
    ],
    ids=str,
)
async def test_pages_of_all_ranks_arrive_before_the_aux_slot(
    tmp_path: Path, ranks: tuple[int, int], sizes: tuple[int, int]
) -> None:
    layouts = [replace(WHOLE, page_size=size) for size in sizes]
    draw = np.random.default_rng(1)
    shape = (PAGES, WHOLE.kv_heads, WHOLE.layers, 2, sizes[0], WHOLE.row_bytes)
    whole = draw.integers(1, 256, shape, dtype=np.uint8)
    tables = [[int(p) for p in draw.permutation(PAGES)[: layout.pages_for(TOKENS)]] for layout in layouts]
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(instance(tmp_path, "p", ranks[0], sizes[0], whole))
        decode = await stack.enter_async_context(instance(tmp_path, "d", ranks[1], sizes[1]))
        ours, theirs = prefill.opened, decode.opened
        peer = theirs.transfer.endpoint
        assert (len(peer.devices), peer.layout.shards) == (ranks[1], ranks[1])
        slot = theirs.transfer.aux.take()
        landed = theirs.transfer.expect("room", slot)
        await ours.writes.connect(peer)
        moved = 0
        for tokens in (range(32), range(32, TOKENS)):
            moved += await ours.writes.write(peer, Copy(tokens, *tables), LATER_MS)
        source = ours.transfer.aux.take()
        ours.transfer.aux.write(source, AuxRecord(stamp=1, num_pages=1, first_token=7, num_cached_tokens=0))
        await ours.transfer.write_aux(peer.agent, source, slot, "room", LATER_MS)
        theirs.transfer.poll_often("room")
        await asyncio.wait_for(landed, PATIENCE_S)
        for rank in range(ranks[1]):
            for head in of_shard(layouts[1], rank, ranks[1]).heads:
                written = decode.head(replace(layouts[1], shards=ranks[1]), rank, head)
                for token in range(TOKENS):
                    there = written[tables[1][token // sizes[1]], ..., token % sizes[1], :]
                    here = whole[tables[0][token // sizes[0]], head, ..., token % sizes[0], :]
                    assert (there == here).all(), (rank, head, token)
        sent, landed_sums = (
            await sums(prefill, layouts, tables[0], ranks[1]),
            await sums(decode, layouts[::-1], tables[1], ranks[0]),
        )
        assert sent == landed_sums
        assert len(sent) == -(-TOKENS // max(sizes))
        for rank in range(ranks[1]):  # a byte of token 70, which only one rank may have
            broken = decode.pools[rank][tables[1][70 // sizes[1]], 0, 0, 0, 70 % sizes[1]]
            broken[0] ^= 1
            found = await sums(decode, layouts[::-1], tables[1], ranks[0])
            broken[0] ^= 1
            assert [i for i in range(len(sent)) if found[i] != sent[i]] == [70 // max(sizes)]
        if sizes[0] == sizes[1]:
            assert moved == len(tables[1]) * peer.page_bytes
        await theirs.transfer.drain_sockets()
        await ours.writes.disconnect(peer.agent)
        with pytest.raises(TransferFailed, match="no connection"):
            await ours.writes.write(peer, Copy(range(16), *tables), LATER_MS)


async def test_a_rank_that_fails_fails_the_write_once_all_others_have_ended(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(instance(tmp_path, "p", 2, 16))
        decode = await stack.enter_async_context(instance(tmp_path, "d", 2, 16))
        peer = decode.opened.transfer.endpoint
        landed = decode.opened.transfer.expect("room", decode.opened.transfer.aux.take())
        await prefill.opened.transfer.connect(replace(peer, followers=[]))  # rank 0 alone
        with pytest.raises(TransferFailed, match="rank 1: "):
            await asyncio.wait_for(prefill.opened.writes.write(peer, Copy(range(16), [1], [2]), LATER_MS), PATIENCE_S)
        landed.cancel()


async def test_a_follower_posts_nothing_after_the_deadline(tmp_path: Path) -> None:
    """It may have been stopped before it read its order. Meanwhile the peer may have reused its pages."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(instance(tmp_path, "p", 2, 16))
        decode = await stack.enter_async_context(instance(tmp_path, "d", 2, 16))
        prefill.pools[1][:] = 7
        peer = decode.opened.transfer.endpoint
        landed = decode.opened.transfer.expect("room", decode.opened.transfer.aux.take())
        await prefill.opened.writes.connect(peer)
        (connection,) = prefill.opened.writes.connections
        with pytest.raises(TransferFailed, match="rank 1: the deadline of the offer passed"):
            await asyncio.wait_for(connection.ask(Write(peer.agent, (0, 16), [1], [2], deadline_unix_ms=1)), PATIENCE_S)
        landed.cancel()
        assert not decode.pools[1].any()


async def test_no_rank_posts_a_step_of_its_write_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance may be stopped between two steps of a long write."""
    monkeypatch.setattr(nixl_transfer, "SHORT_BYTES", 1)  # a page a step
    num_steps = 2 * PAGES
    looks: Iterator[int] = iter(())
    monkeypatch.setattr(backend, "time", SimpleNamespace(time=lambda: next(looks)))
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(instance(tmp_path, "p", 2, 16))
        decode = await stack.enter_async_context(instance(tmp_path, "d", 2, 16))
        peer, writes = decode.opened.transfer.endpoint, prefill.opened.writes
        landed = decode.opened.transfer.expect("room", decode.opened.transfer.aux.take())
        await writes.connect(peer)
        whole = Copy(range(16 * PAGES), range(PAGES), range(PAGES))
        for number, in_time in enumerate((num_steps, 0, 1, 7, num_steps - 1), 1):
            looks = chain(repeat(1, in_time), repeat(3))
            for pool in prefill.pools:
                pool[:] = number
            write = asyncio.wait_for(writes.write(peer, whole, 2000), PATIENCE_S)
            if in_time == num_steps:
                assert await write == peer.page_bytes * PAGES
            else:
                with pytest.raises((DeadlineExceeded, TransferFailed), match="the deadline of the offer passed"):
                    await write
            written = sum(int((page == number).all()) for pool in decode.pools for page in pool)
            touched = sum(int((page == number).any()) for pool in decode.pools for page in pool)
            assert (written, touched) == (in_time, in_time)
        landed.cancel()
