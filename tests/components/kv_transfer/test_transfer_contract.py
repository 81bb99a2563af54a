"""The contract of every backend, between two real processes."""

import asyncio
import gc
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from components.errors import DeadlineExceeded, IncompatibleLayout, TransferFailed
from components.kv_transfer.aux import AuxRecord
from components.kv_transfer.backend import KvTransfer
from components.kv_transfer.backends import kv_opener
from components.kv_transfer.pieces import cut
from components.startup import WrongSettings
from tests.components.kv_transfer.nixl_peer import LATER_MS, LAYOUT, NUM_PAGES, Pages, on_tested_device
from tests.components.kv_transfer.peer_process import Peer, StartPeer, running_peers
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

HOST: Final = "127.0.0.1"
OPEN_FILES: Final = Path("/proc/self/fd")
THREADS: Final = Path("/proc/self/task")
ROUNDS: Final = 3
LONGEST_STALL_S: Final = 0.4
PAST_MS: Final = 1  # a deadline before all tests


@pytest.fixture(scope="module", params=["nixl", "mooncake", "fake"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        kv_opener(name)
    except WrongSettings as exc:
        pytest.skip(exc.message)
    return name


@pytest.fixture(scope="module")
def start_peer(backend: str) -> Iterator[StartPeer]:
    with running_peers() as start:
        yield lambda agent: start(f"{agent}-{random.getrandbits(32):x}", backend)


@pytest.fixture(scope="module")
def shared_peer(start_peer: StartPeer) -> Peer:
    """A peer for tests that do not kill it."""
    peer = start_peer("decode-shared")
    assert peer.endpoint.num_pages == NUM_PAGES  # read first: it is the first line
    return peer


@pytest.fixture
def pages() -> Pages:
    mine = on_tested_device()
    mine.fill(seed=random.getrandbits(32))
    return mine


@pytest.fixture
async def transfer(backend: str, pages: Pages) -> AsyncIterator[KvTransfer]:
    async with kv_opener(backend)(pages, f"prefill-{random.getrandbits(32):x}", HOST, NUM_PAGES) as opened:
        yield opened


async def _tell(transfer: KvTransfer, peer: Peer, room: str, record: AuxRecord, target_slot: int = 2) -> None:
    slot = transfer.aux.take()
    transfer.aux.write(slot, record)
    await transfer.write_aux(peer.endpoint.agent, slot, target_slot, room, LATER_MS)
    transfer.aux.give_back(slot)


@pytest.mark.parametrize("count", [1, 2, NUM_PAGES])
@pytest.mark.parametrize("order", ["neighbours", "permuted"])
async def test_at_the_notification_pages_have_arrived_and_no_other_has_changed(
    transfer: KvTransfer, pages: Pages, shared_peer: Peer, backend: str, count: int, order: str
) -> None:
    draw = random.Random(count)
    source, target = draw.sample(range(NUM_PAGES), count), draw.sample(range(NUM_PAGES), count)
    if order == "neighbours":
        source = target = list(range(NUM_PAGES - count, NUM_PAGES))
    room = f"boot/{draw.getrandbits(40):x}"
    await transfer.connect(shared_peer.endpoint)
    before = json.loads(shared_peer.say("pages"))["pages"]
    assert shared_peer.say(f"expect {room} 2") == "expecting\n"
    moved = await transfer.write_pages(shared_peer.endpoint.agent, source, target, LATER_MS)
    await _tell(transfer, shared_peer, room, AuxRecord(7 + count, count, -42, 3))
    landed = json.loads(shared_peer.read())
    expected = list(before)
    if backend != "fake":
        assert moved == count * LAYOUT.page_bytes
        for ours, theirs in zip(source, target, strict=True):
            expected[theirs] = pages.hashes()[ours]
        assert expected != before
    else:
        assert moved == 0
    assert landed["pages"] == expected
    assert landed["aux"][2] == asdict(AuxRecord(7 + count, count, -42, 3))


async def test_a_notification_is_for_exactly_its_room_however_late_it_comes(
    transfer: KvTransfer, shared_peer: Peer
) -> None:
    room = f"boot/{random.getrandbits(40):x}"
    await transfer.connect(shared_peer.endpoint)
    shared_peer.say(f"expect {room}0 2")
    shared_peer.say(f"expect {room} 2")
    await _tell(transfer, shared_peer, "boot/nobody-expects-this", AuxRecord(1, 1, 1, 1))
    reading = asyncio.create_task(asyncio.to_thread(shared_peer.read))
    assert not (await asyncio.wait((reading,), timeout=1.5))[0]
    await _tell(transfer, shared_peer, room, AuxRecord(2, 1, 1, 1))
    assert json.loads(await asyncio.wait_for(reading, PATIENCE_S))["aux"][2]["stamp"] == 2
    reading = asyncio.create_task(asyncio.to_thread(shared_peer.read))
    assert not (await asyncio.wait((reading,), timeout=0.3))[0]
    await _tell(transfer, shared_peer, f"{room}0", AuxRecord(3, 1, 1, 1))
    assert json.loads(await asyncio.wait_for(reading, PATIENCE_S))["aux"][2]["stamp"] == 3


async def test_many_concurrent_transfers_each_get_their_notification(
    transfer: KvTransfer, pages: Pages, shared_peer: Peer, backend: str
) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await asyncio.gather(*(transfer.connect(shared_peer.endpoint) for _ in range(5)))
    await asyncio.gather(*(transfer.write_pages(agent, [p], [NUM_PAGES - 1 - p], LATER_MS) for p in range(NUM_PAGES)))
    scattered = list(range(0, NUM_PAGES, 2))
    await asyncio.gather(*(transfer.write_pages(agent, scattered, scattered[::-1], LATER_MS) for _ in range(40)))
    expected = pages.hashes()[::-1]
    for ours, theirs in zip(scattered, scattered[::-1], strict=True):
        expected[theirs] = pages.hashes()[ours]
    assert (json.loads(shared_peer.say("pages"))["pages"] == expected) == (backend != "fake")


async def test_a_cancelled_caller_leaves_the_connection_whole(transfer: KvTransfer, shared_peer: Peer) -> None:
    agent = shared_peer.endpoint.agent
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    writes = [asyncio.ensure_future(transfer.write_pages(agent, [p], [p], LATER_MS)) for p in range(8)]
    await asyncio.sleep(0)
    for write in writes[::2]:
        write.cancel()
    await asyncio.wait(writes)
    assert [write.cancelled() for write in writes] == [True, False] * 4
    await transfer.write_pages(agent, range(NUM_PAGES), range(NUM_PAGES), LATER_MS)


async def test_an_unknown_peer_and_pages_out_of_range_are_failed_transfers(
    transfer: KvTransfer, shared_peer: Peer
) -> None:
    with pytest.raises(TransferFailed, match="no connection to decode-nobody"):
        await transfer.write_pages("decode-nobody", [0], [0], LATER_MS)
    with pytest.raises(TransferFailed, match="no connection to decode-nobody"):
        await transfer.write_aux("decode-nobody", 0, 0, "room", LATER_MS)
    await transfer.disconnect("decode-nobody")
    await transfer.connect(shared_peer.endpoint)
    for source, target in (([NUM_PAGES], [0]), ([0], [NUM_PAGES]), ([0, 1], [0])):
        with pytest.raises(TransferFailed):
            await transfer.write_pages(shared_peer.endpoint.agent, source, target, LATER_MS)


async def test_nothing_is_posted_after_the_deadline(transfer: KvTransfer, pages: Pages, shared_peer: Peer) -> None:
    """A stopped process may post late. By then the peer may have reused its pages and slot."""
    agent = shared_peer.endpoint.agent
    await transfer.connect(shared_peer.endpoint)
    shared_peer.say("expect never-sent")
    slot = transfer.aux.take()
    transfer.aux.write(slot, AuxRecord(99, 1, 1, 1))
    before = json.loads(shared_peer.say("pages"))
    assert before["pages"] != pages.hashes()
    late = [
        transfer.write_pages(agent, [0], [1], PAST_MS),
        transfer.write_pages(agent, range(NUM_PAGES), range(NUM_PAGES), PAST_MS),
        transfer.write_pieces(agent, cut(LAYOUT, LAYOUT, range(100), range(NUM_PAGES), range(NUM_PAGES)), PAST_MS),
        transfer.write_aux(agent, slot, 2, "late", PAST_MS),
    ]
    for write in late:
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(write, PATIENCE_S)
    assert json.loads(shared_peer.say("pages")) == before
    await transfer.write_pages(agent, [0], [0], LATER_MS)


@pytest.mark.parametrize("lie", ["AAAA", "no address", "127.0.0.1:1,127.0.0.1:1"])
async def test_an_endpoint_that_lies_is_a_failed_transfer_and_the_backend_lives(
    transfer: KvTransfer, shared_peer: Peer, lie: str
) -> None:
    shared_peer.say("expect never-sent")
    for change in ({"agent_metadata": lie}, {"agent": "somebody-else"}):
        with pytest.raises(TransferFailed):
            await transfer.connect(replace(shared_peer.endpoint, **change))
    await transfer.connect(shared_peer.endpoint)
    await transfer.write_pages(shared_peer.endpoint.agent, [0], [0], LATER_MS)


async def test_another_backend_or_layout_is_refused_with_both_values(transfer: KvTransfer, shared_peer: Peer) -> None:
    with pytest.raises(IncompatibleLayout, match=f"{transfer.endpoint.backend} here, elsewhere there"):
        await transfer.connect(replace(shared_peer.endpoint, backend="elsewhere"))
    with pytest.raises(IncompatibleLayout, match="layers: 2 here, 3 there"):
        await transfer.connect(replace(shared_peer.endpoint, layout=replace(LAYOUT, layers=3)))
    with pytest.raises(TransferFailed, match="no connection"):
        await transfer.write_pages(shared_peer.endpoint.agent, [0], [0], LATER_MS)


async def test_a_dead_peer_fails_its_writes_and_a_restarted_one_is_served(
    transfer: KvTransfer, pages: Pages, start_peer: StartPeer, backend: str
) -> None:
    first, again = start_peer("decode-first"), start_peer("decode-again")
    await transfer.connect(first.endpoint)
    first.say("expect never-sent")
    await transfer.write_pages(first.endpoint.agent, [0], [0], LATER_MS)
    first.kill()
    for _ in range(2):
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(
                transfer.write_pages(first.endpoint.agent, range(32), range(32), LATER_MS), PATIENCE_S
            )
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(transfer.write_aux(first.endpoint.agent, 0, 0, "room", LATER_MS), PATIENCE_S)
    await transfer.disconnect(first.endpoint.agent)
    await transfer.disconnect(first.endpoint.agent)
    with pytest.raises(TransferFailed, match="no connection"):
        await transfer.write_pages(first.endpoint.agent, [0], [0], LATER_MS)
    await transfer.connect(again.endpoint)
    again.say("expect room")
    await transfer.write_pages(again.endpoint.agent, range(NUM_PAGES), range(NUM_PAGES), LATER_MS)
    await transfer.write_aux(again.endpoint.agent, 0, 0, "room", LATER_MS)
    assert (json.loads(again.read())["pages"] == pages.hashes()) == (backend != "fake")


async def test_forgetting_a_peer_that_hangs_ends_its_write_and_nothing_of_later_pages_leaves(
    transfer: KvTransfer, pages: Pages, start_peer: StartPeer, backend: str
) -> None:
    """A stopped process may continue later, when our pages belong to another request."""
    hung = start_peer("decode-hung")
    await transfer.connect(hung.endpoint)
    hung.say("expect never-sent")
    before = json.loads(hung.say("pages"))["pages"]
    hung.popen.send_signal(signal.SIGSTOP)
    agent, everything = hung.endpoint.agent, range(NUM_PAGES)
    # more than any socket buffer holds
    writes = [asyncio.ensure_future(transfer.write_pages(agent, everything, everything, LATER_MS)) for _ in range(16)]
    assert not (await asyncio.wait(writes, timeout=0.3))[0]
    await transfer.disconnect(agent)
    for write in writes:
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(write, PATIENCE_S)
    pages.set_all(0xEE)
    theirs = pages.hashes()[0]
    hung.popen.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    after = json.loads(hung.say("pages"))["pages"]
    assert theirs not in after
    if backend == "fake":
        assert after == before


async def test_peers_come_and_go_without_a_standstill_of_the_event_loop_or_files_left_open(
    backend: str, pages: Pages, shared_peer: Peer
) -> None:
    """The best of a few rounds counts: other load spoils some."""
    shared_peer.say("expect never-sent")
    seen = []
    for _ in range(ROUNDS):
        async with kv_opener(backend)(pages, f"prefill-{random.getrandbits(32):x}", HOST, NUM_PAGES) as transfer:
            seen.append(await _come_and_go(transfer, shared_peer))
        if seen[-1][0] < LONGEST_STALL_S and seen[-1][1] < 5:
            return
    raise AssertionError(f"(seconds of a standstill, files left open) of each round: {seen}")


async def _come_and_go(transfer: KvTransfer, peer: Peer) -> tuple[float, int]:
    """Return the longest pause of the event loop in seconds, and the number of files left open."""
    stalls = [0.0]

    async def watch() -> None:
        while True:
            slept = time.monotonic()
            await asyncio.sleep(0.005)
            stalls.append(time.monotonic() - slept)

    gc.collect()  # so that it closes no files of earlier tests meanwhile
    watching = asyncio.create_task(watch())
    for turn in range(4):
        if turn == 1:
            num_open = len(list(OPEN_FILES.iterdir()))
        await transfer.connect(peer.endpoint)
        await transfer.write_pages(peer.endpoint.agent, range(NUM_PAGES), range(NUM_PAGES), LATER_MS)
        await transfer.disconnect(peer.endpoint.agent)
        await asyncio.sleep(0.01)
    watching.cancel()
    return max(stalls), len(list(OPEN_FILES.iterdir())) - num_open


@pytest.fixture
def earlier_threads() -> set[str]:
    """The threads that run before `transfer` is opened; a test must request this fixture first."""
    return {task.name for task in THREADS.iterdir()}


async def test_nothing_runs_without_a_waiting_caller(
    earlier_threads: set[str], transfer: KvTransfer, shared_peer: Peer, backend: str
) -> None:
    """An idle second costs well under 0.2 s of processor time; only NIXL polls while it expects a notification."""
    shared_peer.say("expect never-sent")
    await transfer.connect(shared_peer.endpoint)
    await transfer.write_pages(shared_peer.endpoint.agent, [0], [0], LATER_MS)
    expected = transfer.expect("never", 0)
    if backend == "nixl":
        expected.cancel()
    used_s, began = _used_s(earlier_threads), time.monotonic()
    await asyncio.sleep(1)
    assert _used_s(earlier_threads) - used_s < 0.2 * (time.monotonic() - began)


def _used_s(earlier_threads: set[str]) -> float:
    """Return the processor time of this thread and of all but `earlier_threads`."""
    started = [task for task in THREADS.iterdir() if task.name not in earlier_threads]
    ticks = 0
    for task in started:
        with suppress(OSError):  # it has ended
            user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
    return time.thread_time() + ticks / os.sysconf("SC_CLK_TCK")
