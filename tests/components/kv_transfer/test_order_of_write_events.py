"""NIXL's writes in every order of events: a write's future ends once, and not while bytes may be in flight.

The library is a stand-in, whose links break and whose handles are released when a test says so.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from types import SimpleNamespace
from typing import Any, Final

import pytest
from msgspec.structs import replace

from components.errors import DeadlineExceeded, TransferFailed
from components.kv_transfer import backend, nixl_transfer
from components.kv_transfer.nixl_transfer import NixlTransfer, open_nixl
from components.wire.instances import KvEndpoint
from tests.components.kv_transfer.fake_transfer import endpoint
from tests.components.kv_transfer.nixl_peer import LATER_MS, LAYOUT, of_size
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

PEER: Final = "decode"


@dataclass(eq=False)
class Handle:
    agent: str
    state: str = "PROC"
    is_active: bool = False  # failed, but NIXL does not release it yet
    is_released: bool = False
    is_cut_off: bool = False  # its peer was removed

    def release(self) -> None:
        if self.is_active:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.is_released = True

    @property
    def is_over(self) -> bool:
        return self.is_released or self.is_cut_off


@dataclass(eq=False)
class Prepared:
    is_released: bool = False

    def release(self) -> None:
        self.is_released = True


@dataclass
class Library:
    """Replaces nixl_agent."""

    posted: list[Handle] = field(default_factory=list)
    remotes: set[str] = field(default_factory=set)
    prepared: list[Prepared] = field(default_factory=list)

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def register_memory(self, memory: Any, mem_type: str) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"prefill"

    def get_xfer_descs(self, descriptors: Any, mem_type: str) -> Any:
        return descriptors

    def prep_xfer_dlist(self, agent: str, descriptors: Any) -> Prepared:
        self.prepared.append(Prepared())
        return self.prepared[-1]

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.remotes.add(metadata.decode())
        return metadata

    def make_connection(self, agent: str) -> None: ...

    def remove_remote_agent(self, agent: str) -> None:
        self.remotes.remove(agent)
        for handle in self.posted:
            handle.is_cut_off = True

    def make_prepped_xfer(self, how: str, ours: Prepared, source: Any, theirs: Prepared, target: Any) -> Handle:
        assert [ours.is_released, theirs.is_released] == [False, False]
        return Handle(PEER)

    def transfer(self, handle: Handle) -> str:
        self.posted.append(handle)
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.is_cut_off:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return handle.state

    def get_new_notifs(self) -> dict[str, Any]:
        return {}


class Story:
    """A prefill writes to a decode."""

    def __init__(self, library: Library, transfer: NixlTransfer) -> None:
        self.library = library
        self.transfer = transfer
        self.peer: KvEndpoint = replace(
            endpoint(PEER), layout=LAYOUT, agent_metadata=base64.b64encode(PEER.encode()).decode(), backend="nixl/UCX"
        )
        self.writes: list[tuple[asyncio.Future[int], Handle | None]] = []
        self.events: dict[str, Callable[[], Awaitable[None]]] = {
            "write": self.write,
            "end": self.end,
            "break": self.break_,
            "release": self.release,
            "disconnect": lambda: self.transfer.disconnect(PEER),
            "connect": lambda: self.transfer.connect(self.peer),
        }

    async def write(self) -> None:
        before = len(self.library.posted)
        done = asyncio.ensure_future(self.transfer.write_pages(PEER, [0], [0], LATER_MS))
        await self.polled()
        posted = self.library.posted[before:]
        self.writes.append((done, posted[0] if posted else None))

    async def end(self) -> None:
        for handle in self.library.posted:
            if handle.state == "PROC":
                handle.state = "DONE"

    async def break_(self) -> None:
        for handle in self.library.posted:
            if handle.state == "PROC" and not handle.is_over:
                handle.state, handle.is_active = "ERR", True

    async def release(self) -> None:
        for handle in self.library.posted:
            handle.is_active = False

    async def polled(self) -> None:
        for _ in range(2):
            await self.transfer._thread.ask(lambda: None)
            await asyncio.sleep(0)

    def check(self) -> None:
        for done, handle in self.writes:
            if handle is None:
                assert done.done()
                assert isinstance(done.exception(), TransferFailed)
            elif not done.done():
                assert handle.state == "PROC" or handle.is_active, "its end was missed"
                assert not handle.is_over
            elif done.exception() is None:
                assert handle.state == "DONE"
                assert handle.is_released
            else:
                assert isinstance(done.exception(), TransferFailed)
                assert handle.is_over, "it may still land"

    async def check_the_end(self) -> None:
        await self.release()
        await self.transfer.disconnect(PEER)
        await self.polled()
        self.check()
        assert all(done.done() for done, _ in self.writes)
        transfer = self.transfer
        assert [transfer._writes, transfer._failed, transfer._peers, transfer._lost] == [[], [], {}, set()]
        assert not self.library.remotes
        assert sum(not prepared.is_released for prepared in self.library.prepared) == 1, "of our own pool"
        self.writes.clear()
        self.library.posted.clear()


@pytest.fixture
async def story(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    library = Library()
    monkeypatch.setattr(nixl_transfer, "nixl_agent", lambda _name, _config: library)
    async with open_nixl(of_size(LAYOUT.page_size), "prefill") as transfer:
        yield Story(library, transfer)


async def run(story: Story, order: Sequence[str]) -> None:
    await story.transfer.connect(story.peer)
    await story.write()
    for name in order:
        await story.events[name]()
        await story.polled()
        story.check()
    await story.check_the_end()


@pytest.mark.parametrize(
    "names",
    [
        ["write", "break", "release", "disconnect", "connect"],
        ["write", "end", "break", "disconnect", "connect"],
        ["break", "connect", "write", "end"],
    ],
    ids=" ".join,
)
async def test_a_write_ends_once_and_not_while_it_may_land(names: list[str], story: Story) -> None:
    for order in permutations(names):
        try:
            await run(story, order)
        except Exception as exc:
            exc.add_note(str(order))
            raise


async def test_a_process_that_leaves_is_not_kept_by_its_open_writes(story: Story) -> None:
    """A worker that left while a peer was unreachable never ended: its transfer waited for the write, even if cancelled."""
    await story.transfer.connect(story.peer)
    await story.write()
    await story.break_()
    await story.write()
    await story.polled()
    writes = [done for done, _ in story.writes]
    assert not any(write.done() for write in writes)
    await story.transfer.stop()
    for write in writes:
        with pytest.raises(TransferFailed, match="this process is leaving"):
            await asyncio.wait_for(write, PATIENCE_S)


@pytest.mark.parametrize(("call", "num_posted"), [("make_prepped_xfer", 0), ("transfer", 1)])
@pytest.mark.parametrize("step", range(3))
async def test_a_long_write_posts_no_step_after_its_deadline(
    call: str, num_posted: int, step: int, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first step checked it: a prefill that was stopped later overwrote pages that decode had reused."""
    await story.transfer.connect(story.peer)
    clock = SimpleNamespace(now_s=1.0)
    clock.time = lambda: clock.now_s
    made: list[Handle] = []

    def make(*_: Any) -> Handle:
        made.append(Handle(PEER, state="DONE"))
        return made[-1]

    monkeypatch.setattr(story.library, "make_prepped_xfer", make)
    plain = getattr(story.library, call)

    def stopped_at_a_step(*args: Any) -> Any:
        result = plain(*args)
        if len(made) == step + 1:
            clock.now_s = 3.0
        return result

    monkeypatch.setattr(story.library, call, stopped_at_a_step)
    monkeypatch.setattr(backend, "time", clock)
    monkeypatch.setattr(story.transfer, "_short_pages", 2)
    with pytest.raises(DeadlineExceeded, match="the deadline of the offer passed"):
        await asyncio.wait_for(story.transfer.write_pages(PEER, range(8), range(8), 2000), PATIENCE_S)
    assert len(story.library.posted) == step + num_posted
    assert all(handle.is_released for handle in made)
    await story.check_the_end()
