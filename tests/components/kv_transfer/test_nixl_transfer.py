import asyncio
import dataclasses
import json
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from components.errors import KvCorrupt, TransferFailed
from components.kv_transfer import aux, nixl_transfer, slow_peers
from components.kv_transfer.aux import POLL_COMING_S, POLL_EXPECTED_S, AuxRecord
from components.kv_transfer.nixl_api import nixl_agent_config
from components.kv_transfer.nixl_transfer import (
    DESCRIPTOR_BYTES,
    SHORT_BYTES,
    NixlTransfer,
    open_nixl,
)
from components.kv_transfer.pieces import Pieces, cut
from tests.components.kv_transfer.nixl_peer import LATER_MS, LAYOUT, NUM_PAGES, Pages, of_size, on_tested_device
from tests.components.kv_transfer.peer_process import Peer, StartPeer, running_peers
from tests.components.kv_transfer.pools import brute_force
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio

REPO: Final = Path(__file__).resolve().parents[3]
TRIES: Final = 20  # the thread may interfere


@pytest.fixture(scope="module")
def start_peer() -> Iterator[StartPeer]:
    with running_peers() as start:
        yield start


@pytest.fixture(scope="module")
def shared_peer(start_peer: StartPeer) -> Peer:
    """A peer for tests that do not kill it."""
    return start_peer("decode-shared")


@pytest.fixture
def pages() -> Pages:
    mine = on_tested_device()
    mine.fill(seed=1)
    return mine


@pytest.fixture
async def transfer(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NixlTransfer]:
    counting = partial(nixl_agent_config, capture_telemetry=True)
    monkeypatch.setattr(nixl_transfer, "nixl_agent_config", counting)
    async with open_nixl(pages, f"prefill-{random.getrandbits(32):x}") as opened:
        yield opened


async def test_a_lost_connection_to_a_living_peer_is_made_again(
    transfer: NixlTransfer, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL refused all writes to a decode whose link had been cut for a while."""
    peer = shared_peer.endpoint
    shared_peer.say("expect never-sent")  # UCX answers only while the process waits for something
    await transfer.connect(peer)
    post = transfer._agent.transfer

    def disconnected(handle: Any) -> Any:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(transfer._agent, "transfer", disconnected)
    with pytest.raises(TransferFailed):
        await transfer.write_pages(peer.agent, [0], [0], LATER_MS)
    monkeypatch.setattr(transfer._agent, "transfer", post)
    removed: list[str] = []
    monkeypatch.setattr(transfer._agent, "remove_remote_agent", _noted(transfer._agent.remove_remote_agent, removed))
    await transfer.connect(peer)
    await transfer.connect(peer)
    assert removed == [peer.agent]
    assert await transfer.write_pages(peer.agent, [0, 1], [0, 1], LATER_MS) == 2 * LAYOUT.page_bytes


def _noted(remove: Callable[[str], None], removed: list[str]) -> Callable[[str], None]:
    def noting(agent: str) -> None:
        removed.append(agent)
        remove(agent)

    return noting


class Posts:
    """Records every posted write: its thread and number of descriptors."""

    def __init__(self, transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.descriptors: list[int] = []
        self.num_bytes: list[int] = []  # by NIXL's own telemetry
        self._agent = transfer._agent
        self._post = self._agent.transfer
        monkeypatch.setattr(self._agent, "transfer", self._transfer)

    def _transfer(self, handle: Any) -> Any:
        self.threads.append(threading.get_ident())
        state = self._post(handle)
        while state == "PROC":  # the first one, until there is a connection
            state = self._agent.check_xfer_state(handle)
        counted = self._agent.get_xfer_telemetry(handle)
        self.descriptors.append(counted.descCount)
        self.num_bytes.append(counted.totalBytes)
        return state


@pytest.fixture
async def posts(transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch) -> Posts:
    return Posts(transfer, monkeypatch)


async def test_neighbours_on_both_sides_merge_into_one_descriptor(
    transfer: NixlTransfer, shared_peer: Peer, posts: Posts
) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    moved = [
        await transfer.write_pages(agent, range(16), range(32, 48), LATER_MS),
        await transfer.write_pages(agent, [0, 1, 4, 5], [7, 8, 9, 10], LATER_MS),
        await transfer.write_pages(agent, [0, 2, 4], [1, 3, 5], LATER_MS),
    ]
    assert posts.descriptors == [1, 2, 3]
    assert posts.num_bytes == moved, "NIXL counts the bytes that we report"
    await transfer.write_pieces(agent, cut(LAYOUT, LAYOUT, range(16), [0], [0]), LATER_MS)
    assert posts.num_bytes[-1] == LAYOUT.page_bytes


async def test_the_event_loop_posts_pages_some_at_a_time_and_the_thread_pieces(
    transfer: NixlTransfer, shared_peer: Peer, posts: Posts, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    num_short = transfer._short_pages
    # LAYOUT's pages are smaller than DESCRIPTOR_BYTES
    assert num_short * DESCRIPTOR_BYTES <= SHORT_BYTES < (num_short + 1) * DESCRIPTOR_BYTES
    for num_posts, count in ((1, 1), (1, num_short), (3, 2 * num_short + 1)):
        source = [page % NUM_PAGES for page in range(count)]
        for _ in range(TRIES):
            del posts.threads[:]
            await transfer.write_pages(agent, source, source, LATER_MS)
            assert len(posts.threads) == num_posts
            if set(posts.threads) == {threading.get_ident()}:
                break
            await asyncio.sleep(0.05)  # the thread was at it
        else:
            pytest.fail(f"{count} pages were never posted on the event loop")
    pieces = cut(LAYOUT, LAYOUT, range(8), [0], [0])
    monkeypatch.setattr(nixl_transfer, "POSTED_PIECES", len(pieces) // 2 - 1)
    del posts.threads[:]
    moved = await transfer.write_pieces(agent, pieces, LATER_MS)
    assert moved == 8 * LAYOUT.num_stripes * LAYOUT.row_bytes
    assert len(posts.threads) == 3
    assert threading.get_ident() not in posts.threads


async def test_only_a_write_between_two_gpus_is_judged_by_its_speed(
    transfer: NixlTransfer, shared_peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pools are in main memory, which is as slow as GPUs without a direct path."""
    agent, pages = shared_peer.endpoint.agent, range(4)
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    monkeypatch.setattr(slow_peers, "MIN_JUDGED_BYTES", 2 * LAYOUT.page_bytes)
    monkeypatch.setattr(slow_peers, "SLOW_BYTES_S", float("inf"))
    peer = transfer._peers[agent]
    for ours, theirs, warnings in (("cpu", "cuda:0", 0), ("cuda:0", "cpu", 0), ("cuda:0", "cuda:1", 1)):
        monkeypatch.setattr(transfer, "_region", dataclasses.replace(transfer._region, device=ours))
        monkeypatch.setattr(peer, "endpoint", replace(peer.endpoint, device=theirs))
        for _ in range(2):
            await transfer.write_pages(agent, pages, pages, LATER_MS)
        assert len(caplog.records) == warnings


async def test_others_have_a_turn_in_the_midst_of_a_long_write_and_may_end_it(
    transfer: NixlTransfer, shared_peer: Peer, posts: Posts
) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    source = [page % NUM_PAGES for page in range(3 * transfer._short_pages)]
    writing = asyncio.ensure_future(transfer.write_pages(agent, source, source, LATER_MS))
    while not posts.threads:
        await asyncio.sleep(0)
    await transfer.disconnect(agent)
    with pytest.raises(TransferFailed, match="no connection"):
        await writing
    assert len(posts.threads) < 3


async def test_after_the_end_writes_are_refused_and_the_agent_is_not_touched(
    transfer: NixlTransfer, shared_peer: Peer, posts: Posts
) -> None:
    """After `stop`, the event loop posted a short write, and the wait for a long one never ended."""
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    await transfer.write_pages(agent, [1], [1], LATER_MS)
    await transfer.stop()
    for source in ([1], list(range(NUM_PAGES)) * (transfer._short_pages // NUM_PAGES + 1)):
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(transfer.write_pages(agent, source, source, LATER_MS), PATIENCE_S)
    with pytest.raises(TransferFailed):
        await transfer.write_aux(agent, 0, 0, "late", LATER_MS)
    assert posts.descriptors == [1]


async def test_a_short_write_that_has_landed_at_once_costs_no_turn_of_the_loop(
    transfer: NixlTransfer, pages: Pages, shared_peer: Peer
) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    await transfer.write_pages(agent, [1], [1], LATER_MS)  # sets the connection up
    moved = 0
    for _ in range(TRIES):
        write = asyncio.ensure_future(transfer.write_pages(agent, [3], [5], LATER_MS))
        if write.done():
            moved = write.result()
            break
        await write  # the thread was at it
        await asyncio.sleep(0.05)
    assert moved == LAYOUT.page_bytes
    assert json.loads(shared_peer.say("pages"))["pages"][5] == pages.hashes()[3]


async def test_a_peer_that_is_forgotten_and_comes_back_is_connected_again(
    transfer: NixlTransfer, pages: Pages, start_peer: StartPeer
) -> None:
    """Even when it comes back before the thread has forgotten it."""
    peer = start_peer("decode-back")
    await transfer.connect(peer.endpoint)
    peer.say("expect never-sent")
    await transfer.write_pages("decode-back", [0], [0], LATER_MS)
    forgetting = asyncio.create_task(transfer.disconnect("decode-back"))
    await asyncio.sleep(0)
    await transfer.connect(peer.endpoint)
    await transfer.write_pages("decode-back", [1], [2], LATER_MS)
    await forgetting
    assert json.loads(peer.say("pages"))["pages"][2] == pages.hashes()[1]


async def test_many_concurrent_writes_of_the_thread_each_get_their_notification(
    transfer: NixlTransfer, pages: Pages, shared_peer: Peer
) -> None:
    transfer._short_pages = 0
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await asyncio.gather(*(transfer.connect(shared_peer.endpoint) for _ in range(5)))
    await asyncio.gather(*(transfer.write_pages(agent, [p], [NUM_PAGES - 1 - p], LATER_MS) for p in range(NUM_PAGES)))
    assert json.loads(shared_peer.say("pages"))["pages"] == pages.hashes()[::-1]


async def test_a_pool_at_no_address_is_a_failed_transfer_and_the_thread_lives(
    transfer: NixlTransfer, shared_peer: Peer
) -> None:
    with pytest.raises(TransferFailed):
        await transfer.connect(replace(shared_peer.endpoint, base_address=-1))
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    await transfer.write_pages(shared_peer.endpoint.agent, [0], [0], LATER_MS)


def rows(pages: Pages) -> NDArray[Any]:
    """Return the pool as [pages, heads, layers, 2, page_size, bytes of a row]."""
    layout = pages.layout
    return pages.memory.reshape(-1, layout.kv_heads, layout.layers, 2, layout.page_size, layout.row_bytes)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (128, 16)])
async def test_pages_of_another_size_land_bit_exact_in_chunks_that_end_inside_a_large_page(
    ours: int, theirs: int, start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt ends inside a page, whose rest must not change, nor any other page."""
    peer = start_peer(f"decode-{theirs}", page_size=theirs)
    mine, expected = on_tested_device(ours), of_size(theirs)
    mine.fill(seed=5)
    monkeypatch.setattr(nixl_transfer, "POSTED_PIECES", 100)
    num_tokens, draw = 500, random.Random(ours)
    source = draw.sample(range(mine.num_pages), mine.layout.pages_for(num_tokens))
    target = draw.sample(range(expected.num_pages), expected.layout.pages_for(num_tokens))
    async with open_nixl(mine, f"prefill-{ours}") as transfer:
        await transfer.connect(peer.endpoint)
        peer.say("expect room")
        num_bytes = 0
        for tokens in (range(64, 112), range(112, 256), range(256, 500)):
            pieces = cut(mine.layout, peer.endpoint.layout, tokens, source, target)
            num_bytes += await transfer.write_pieces(peer.endpoint.agent, pieces, LATER_MS)
        assert num_bytes == (500 - 64) * LAYOUT.num_stripes * LAYOUT.row_bytes
        await transfer.write_aux(peer.endpoint.agent, 0, 0, "room", LATER_MS)
        landed = json.loads(peer.read())["pages"]
    expected.memory[:] = brute_force(range(64, 500), rows(mine), source, rows(expected), target).reshape(
        expected.memory.shape
    )
    assert landed == expected.hashes()


async def test_pieces_outside_of_either_pool_are_a_failed_transfer(transfer: NixlTransfer, shared_peer: Peer) -> None:
    await transfer.connect(shared_peer.endpoint)
    end = NUM_PAGES * LAYOUT.page_bytes
    for source, target in ((end - 4, 0), (0, end - 4), (end, 0), (-4096, 0)):
        pieces = Pieces(*(np.array([number], dtype=np.int64) for number in (source, target, 8)))
        with pytest.raises(TransferFailed):
            await transfer.write_pieces(shared_peer.endpoint.agent, pieces, LATER_MS)
    with pytest.raises(TransferFailed, match="no connection"):
        await transfer.write_pieces("nobody", pieces, LATER_MS)
    shared_peer.say("expect never-sent")  # UCX lets it take in so small a write only while it waits for something
    last = Pieces(*(np.array([number], dtype=np.int64) for number in (end - 8, end - 8, 8)))
    assert await transfer.write_pieces(shared_peer.endpoint.agent, last, LATER_MS) == 8


async def test_a_dead_peer_fails_the_write_of_pieces(transfer: NixlTransfer, start_peer: StartPeer) -> None:
    peer = start_peer("decode-dies", page_size=64)
    await transfer.connect(peer.endpoint)
    pieces = cut(LAYOUT, peer.endpoint.layout, range(128), range(8), range(2))
    peer.say("expect never-sent")
    await transfer.write_pieces("decode-dies", pieces, LATER_MS)
    peer.kill()
    for _ in range(2):
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(transfer.write_pieces("decode-dies", pieces, LATER_MS), PATIENCE_S)
    await transfer.disconnect("decode-dies")
    with pytest.raises(TransferFailed, match="no connection"):
        await transfer.write_pieces("decode-dies", pieces, LATER_MS)
    assert not transfer._writes
    assert not transfer._failed


async def test_a_notification_is_polled_often_once_it_is_announced(transfer: NixlTransfer) -> None:
    transfer.poll_often("boot/1")  # not expected
    first, second = transfer.expect("boot/1", 1), transfer.expect("boot/2", 2)
    assert transfer._patience() == POLL_EXPECTED_S
    transfer.poll_often("boot/2")
    assert transfer._patience() == POLL_COMING_S
    second.cancel()
    await asyncio.sleep(0)
    assert transfer._patience() == POLL_EXPECTED_S
    first.cancel()


async def test_landed_data_is_seen_as_soon_as_it_is_announced(transfer: NixlTransfer) -> None:
    expected = transfer.expect("boot/1", 3)
    transfer.aux.write(3, AuxRecord(1, 2, 3, 4))
    transfer.aux.seal(3, "boot/2")
    transfer.poll_often("boot/1")
    assert list(transfer._arrivals._coming) == ["boot/1"], "it is another's, or not whole yet"
    transfer.aux.seal(3, "boot/1")
    transfer.poll_often("boot/1")
    assert not transfer._arrivals._expected
    await asyncio.wait_for(expected, PATIENCE_S)
    await asyncio.sleep(0)  # since Python 3.12 `wait_for` returns at once
    assert not transfer._arrivals._coming


async def test_a_damaged_record_is_reported_long_before_the_transfer_times_out(
    transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aux, "DAMAGED_AFTER_S", 0.05)
    damaged, waits = transfer.expect("boot/1", 3), transfer.expect("boot/2", 4)
    transfer.aux.write(3, AuxRecord(1, 2, 3, 4))
    transfer.aux.seal(3, "boot/1")
    transfer.aux._heads[3]["first_token"] ^= 1
    await asyncio.sleep(0.2)
    assert not damaged.done(), "it may be of somebody else, as long as nobody says that ours is coming"
    transfer.poll_often("boot/1")
    with pytest.raises(KvCorrupt, match="was corrupted on its way from prefill"):
        await asyncio.wait_for(damaged, PATIENCE_S)
    assert list(transfer._arrivals._expected) == ["boot/2"]
    assert not waits.done()
    waits.cancel()


async def test_a_hint_that_comes_to_nothing_is_looked_after_for_a_while_only(
    transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aux, "COMING_S", 0.5)
    expected = transfer.expect("boot/1", 3)
    transfer.poll_often("boot/1")
    await until(lambda: transfer._patience() != POLL_COMING_S)
    assert transfer._patience() == POLL_EXPECTED_S
    transfer.poll_often("boot/1")
    assert transfer._patience() == POLL_COMING_S
    expected.cancel()


async def test_of_an_aux_slot_without_checksums_its_head_alone_is_written() -> None:
    async with (
        open_nixl(Pages(), "prefill-heads", max_request_pages=100) as ours,
        open_nixl(Pages(), "decode-heads", max_request_pages=100) as theirs,
    ):
        await ours.connect(theirs.endpoint)
        theirs.aux._checksums[:] = 7
        slot = ours.aux.take()
        for target, checksums in ((1, None), (2, (5, 6))):
            expected = theirs.expect(f"room {target}", target)
            ours.aux.write(slot, AuxRecord(1, 2, 3, 4, checksums=checksums))
            await ours.write_aux("decode-heads", slot, target, f"room {target}", LATER_MS)
            await asyncio.wait_for(expected, PATIENCE_S)
            assert theirs.aux.read(target) == AuxRecord(1, 2, 3, 4, checksums=checksums)
        assert theirs.aux._checksums[1].tolist() == [7] * len(theirs.aux._checksums[1])
        assert theirs.aux._checksums[2].tolist() == [5, 6] + [0] * (len(theirs.aux._checksums[2]) - 2)


async def test_a_receiver_makes_progress_for_a_while_after_it_has_received(
    transfer: NixlTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aux, "LINGER_POLLS", 40)
    expected = transfer.expect("boot/1", 3)
    transfer.aux.seal(3, "boot/1")
    await asyncio.wait_for(expected, PATIENCE_S)
    assert transfer._patience() == POLL_EXPECTED_S, "the writer's own end may depend on us"
    await until(lambda: transfer._patience() is None)


async def test_a_cancelled_transfer_is_not_waited_for(transfer: NixlTransfer) -> None:
    expected = transfer.expect("boot/1", 1)
    assert transfer._patience() is not None
    expected.cancel()
    await asyncio.sleep(0)
    assert transfer._patience() is None


async def test_a_dead_peer_leaves_nothing_behind(transfer: NixlTransfer, start_peer: StartPeer) -> None:
    peer = start_peer("decode-first")
    await transfer.connect(peer.endpoint)
    peer.say("expect never-sent")
    await transfer.write_pages("decode-first", [0], [0], LATER_MS)
    mapped = peer.mapped()
    peer.kill()
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(transfer.write_pages("decode-first", range(32), range(32), LATER_MS), PATIENCE_S)
    await transfer.disconnect("decode-first")
    assert not [file for file in mapped if file.exists()]
    assert not transfer._lost, "names of dead peers pile up"


@pytest.mark.parametrize("short", [True, False])
async def test_a_write_in_flight_fails_when_its_peer_is_killed_or_forgotten(
    transfer: NixlTransfer, start_peer: StartPeer, short: bool
) -> None:
    """A stopped process never answers: forgetting it must end the write."""
    transfer._short_pages *= short
    killed, stopped = start_peer(f"decode-killed-{short}"), start_peer(f"decode-stopped-{short}")
    for peer in (killed, stopped):
        await transfer.connect(peer.endpoint)
        peer.popen.send_signal(signal.SIGSTOP)
    writes = [
        asyncio.ensure_future(transfer.write_pages(p.endpoint.agent, range(64), range(64), LATER_MS))
        for p in (killed, stopped)
    ]
    await asyncio.wait(writes, timeout=0.2)
    assert not any(write.done() for write in writes)
    killed.kill()
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(writes[0], PATIENCE_S)
    assert not writes[1].done()
    await transfer.disconnect(stopped.endpoint.agent)
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(writes[1], PATIENCE_S)
    await transfer._thread.ask(lambda: None)  # the poll that settled it is over
    assert not transfer._writes
    assert not transfer._failed
