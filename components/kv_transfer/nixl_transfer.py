"""The NIXL backend: one agent, with a thread for long writes and polls.

On one machine UCX copies the bytes in the thread that posts a write. Without a progress thread, threads must take turns
(UCS_THREAD_MODE_SERIALIZED).
"""

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np

from components.errors import DeadlineExceeded, TransferFailed
from components.kv_transfer.aux import HEAD, AuxArrivals, AuxBuffer
from components.kv_transfer.backend import check_deadline, check_same_backend, endpoint_of
from components.kv_transfer.nixl_api import nixl_agent, nixl_agent_config
from components.kv_transfer.open_sockets import new_listeners_logged
from components.kv_transfer.own_thread import OwnThread
from components.kv_transfer.pieces import Offsets, Pieces
from components.kv_transfer.slow_peers import SlowPeers
from components.kv_transfer.ucx_settings import (
    choose_devices,
    drop_dead_connections,
    leave_out_rdma,
    unmap_after_writes,
)
from components.startup import WrongSettings
from components.wire.instances import KvEndpoint
from components.wire.layout import KvRegion, check_compatible

log = logging.getLogger(__name__)


POLL_WRITES_S: Final = 0.0002
SHORT_BYTES: Final = 8 << 20  # a write up to this is posted on the event loop, in about 1 ms
DESCRIPTOR_BYTES: Final = 32 << 10  # copied in the time that a descriptor costs
POSTED_PIECES: Final = 2048  # per post, during which other transfers wait


@dataclass(slots=True)
class _Peer:
    endpoint: KvEndpoint
    pages: Any  # prepared descriptors of the peer's whole pool
    aux: "_Slots"  # whole slots, if both sides have room for checksums
    heads: "_Slots"  # slots without checksums


@dataclass(slots=True)
class _Slots:
    ours: Any
    theirs: Any


@dataclass(slots=True)
class _Write:
    agent: str
    handle: Any
    num_bytes: int
    done: asyncio.Future[int]
    posted_s: float  # monotonic


class NixlTransfer:
    def __init__(self, region: KvRegion, agent_name: str, backend: str, max_request_pages: int) -> None:
        self.aux = AuxBuffer(max_checksums=max_request_pages)
        self._region = region
        self._page_bytes = region.layout.page_bytes
        on_cpu = region.device == "cpu"  # CUDA needs a context in each thread
        self._short_pages = max(1, SHORT_BYTES // max(self._page_bytes, DESCRIPTOR_BYTES)) if on_cpu else 0
        self._name = agent_name
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, _Peer] = {}
        self._writes: list[_Write] = []
        self._failed: list[_Write] = []  # NIXL has not released their handles
        self._lost: set[str] = set()  # agents, perhaps alive, whose connection broke
        self._slow = SlowPeers()
        self._thread = OwnThread("NIXL", self._poll)
        self._arrivals = AuxArrivals(self.aux, self._thread)
        self._endpoint: KvEndpoint | None = None

    @property
    def endpoint(self) -> KvEndpoint:
        assert self._endpoint is not None, "start() first"
        return self._endpoint

    async def start(self) -> None:
        self._thread.start()
        try:
            self._endpoint = await self._thread.ask(self._create_agent)
        except TransferFailed as exc:  # an error of NIXL
            raise WrongSettings(
                f"setting kv_transfer: NIXL's plugin {self._backend} cannot be used here ({exc.message}); the usual one is UCX"
            ) from exc

    async def stop(self) -> None:
        """Writes in flight fail, although their bytes may still arrive: do not report transfers as over."""
        await self._thread.stop()
        for write in [*self._writes, *self._failed]:  # otherwise their callers would keep this process from exiting
            self._thread.settle(write.done, error=TransferFailed("this process is leaving"))

    async def connect(self, peer: KvEndpoint) -> None:
        check_same_backend(self.endpoint.backend, peer.backend)
        check_compatible(self._region.layout, peer.layout)
        if peer.agent in self._lost:  # without a disconnect, NIXL never connects again
            log.info("NIXL reconnects to a peer after a failed write", extra={"peer": peer.agent})
            await self.disconnect(peer.agent)
        if peer.agent not in self._peers:
            await self._thread.ask(lambda: self._connect(peer))

    async def disconnect(self, agent: str) -> None:
        known = self._peers.pop(agent, None)  # at once, so a new connection is queued behind this
        self._lost.discard(agent)
        self._slow.forget(agent)
        await self._thread.ask(lambda: self._disconnect(agent, known))

    def write_pages(
        self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int
    ) -> Awaitable[int]:
        return _in_posts(
            len(source),
            self._short_pages or len(source),
            lambda some: self._write_pages(agent, source[some], target[some], deadline_unix_ms),
        )

    def _write_pages(
        self, agent: str, source: Sequence[int], target: Sequence[int], deadline_unix_ms: int
    ) -> asyncio.Future[int]:
        return self._write(
            lambda peer: self._agent.make_prepped_xfer("WRITE", self._pages, list(source), peer.pages, list(target)),
            agent,
            len(source) * self._page_bytes,
            deadline_unix_ms,
            short=self._short_pages > 0,
        )

    def write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> Awaitable[int]:
        return _in_posts(
            len(pieces), POSTED_PIECES, lambda some: self._write_pieces(agent, pieces[some], deadline_unix_ms)
        )

    def _write_pieces(self, agent: str, pieces: Pieces, deadline_unix_ms: int) -> asyncio.Future[int]:
        num_bytes = int(pieces.length.sum())
        return self._write(
            lambda peer: self._unprepared(peer.endpoint, pieces), agent, num_bytes, deadline_unix_ms, short=False
        )

    def write_aux(
        self, agent: str, source_slot: int, target_slot: int, notification: str, deadline_unix_ms: int
    ) -> Awaitable[object]:
        self.aux.seal(source_slot, notification)

        def make(peer: _Peer) -> Any:
            slots = peer.aux if self.aux.has_checksums(source_slot) else peer.heads
            return self._agent.make_prepped_xfer("WRITE", slots.ours, [source_slot], slots.theirs, [target_slot])

        return self._write(make, agent, 0, deadline_unix_ms, short=self._short_pages > 0)  # 0: only pages are counted

    def expect(self, notification: str, slot: int) -> asyncio.Future[None]:
        return self._arrivals.expect(notification, slot)

    def poll_often(self, notification: str) -> None:
        self._arrivals.poll_often(notification)

    async def drain_sockets(self) -> None:
        await self._thread.ask(self._make_progress)

    def _write(
        self, make: Callable[[_Peer], Any], agent: str, num_bytes: int, deadline_unix_ms: int, *, short: bool
    ) -> asyncio.Future[int]:
        done: asyncio.Future[int] = self._loop.create_future()
        post = self._thread.post_short if short else self._thread.post
        post(lambda: self._post(make, agent, num_bytes, deadline_unix_ms, done))
        return done

    # The rest runs on NIXL's thread, or for short writes on the event loop, but never on both at once.

    def _create_agent(self) -> KvEndpoint:
        leave_out_rdma()
        drop_dead_connections()
        if self._region.device != "cpu":
            unmap_after_writes()
            # not above: a mock starts without torch
            import_module("components.kv_transfer.device_pages").open_context(self._region.device)
        config = nixl_agent_config(
            enable_prog_thread=False,  # it would keep a core busy
            backends=[self._backend],
        )
        self._agent = nixl_agent(self._name, config)
        plugins = self._agent.get_plugin_list()
        if self._backend not in plugins:
            raise WrongSettings(
                f"setting kv_transfer: NIXL has no plugin {self._backend!r}; it has {', '.join(sorted(plugins))}"
            )
        region, aux, layout = self._region, self.aux, self._region.layout
        memory, device_id = _memory_type(region.device)
        self._agent.register_memory(
            [(region.address, region.num_pages * layout.page_bytes, device_id, "")], mem_type=memory
        )
        self._agent.register_memory([(aux.address, aux.num_bytes, 0, "")], mem_type="DRAM")
        self._pages = self._prepare(
            "NIXL_INIT_AGENT", region.address, region.num_pages, layout.page_bytes, region.device
        )
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return endpoint_of(f"nixl/{self._backend}", self._name, metadata, region, aux)

    def _prepare(self, agent: str, address: int, count: int, size: int, device: str, *, stride: int = 0) -> Any:
        offsets = np.arange(count) * (stride or size)
        return self._agent.prep_xfer_dlist(agent, self._descriptors(address, offsets, size, device))

    def _unprepared(self, peer: KvEndpoint, pieces: Pieces) -> Any:
        # prepared descriptors do not help: pieces differ between writes
        local = self._descriptors(self._region.address, pieces.source, pieces.length, self._region.device)
        remote = self._descriptors(peer.base_address, pieces.target, pieces.length, peer.device)
        return self._agent.initialize_xfer("WRITE", local, remote, peer.agent)

    def _descriptors(self, address: int, offsets: Offsets, sizes: Offsets | int, device: str) -> Any:
        memory, device_id = _memory_type(device)
        descriptors = np.empty((len(offsets), 3), dtype=np.uint64)  # (address, bytes, device)
        descriptors[:, 0] = np.uint64(address) + offsets.astype(np.uint64)
        descriptors[:, 1] = sizes
        descriptors[:, 2] = device_id
        return self._agent.get_xfer_descs(descriptors, mem_type=memory)

    def _connect(self, peer: KvEndpoint) -> None:
        if peer.agent in self._peers:
            return
        name = self._agent.add_remote_agent(base64.b64decode(peer.agent_metadata))
        agent = name.decode() if isinstance(name, bytes) else name
        if agent != peer.agent:
            raise TransferFailed(f"NIXL metadata of {peer.agent!r} names the agent {agent!r}")
        self._agent.make_connection(agent)
        pages = self._prepare(agent, peer.base_address, peer.num_pages, peer.layout.page_bytes, peer.device)
        size = min(self.aux.slot_bytes, peer.aux_slot_bytes)  # a longer slot's rest stays unused
        self._peers[agent] = _Peer(peer, pages, self._slots(peer, size), self._slots(peer, HEAD.itemsize))

    def _slots(self, peer: KvEndpoint, size: int) -> _Slots:
        ours = self.aux
        return _Slots(
            self._prepare("NIXL_INIT_AGENT", ours.address, ours.num_slots, size, "cpu", stride=ours.slot_bytes),
            self._prepare(peer.agent, peer.aux_address, peer.aux_slots, size, "cpu", stride=peer.aux_slot_bytes),
        )

    def _disconnect(self, agent: str, known: _Peer | None) -> None:
        peer = known or self._peers.pop(agent, None)
        if peer is not None:
            for prepared in (peer.pages, *(side for s in (peer.aux, peer.heads) for side in (s.ours, s.theirs))):
                with contextlib.suppress(Exception):  # a dead peer has already closed its side
                    prepared.release()
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(agent)  # its writes fail with the next poll
        for write in [w for w in self._failed if w.agent == agent]:
            self._failed.remove(write)
            self._thread.settle(write.done, error=TransferFailed(f"{agent} is gone"))

    def _post(
        self,
        make: Callable[[_Peer], Any],
        agent: str,
        num_bytes: int,
        deadline_unix_ms: int,
        done: asyncio.Future[int],
    ) -> bool:
        peer = self._peers.get(agent)
        if peer is None:
            self._thread.settle(done, error=TransferFailed(f"no connection to {agent}"))
            return False
        try:
            handle = make(peer)
        except Exception as exc:  # noqa: BLE001  NIXL's own errors have no common base
            self._thread.settle(
                done, error=TransferFailed(f"NIXL refused the write to {agent}: {exc or type(exc).__name__}")
            )
            return False
        try:
            check_deadline(deadline_unix_ms)  # this process may have been stopped in the queue, or in `make`
        except DeadlineExceeded as exc:
            with contextlib.suppress(Exception):  # nothing is in flight
                handle.release()
            self._thread.settle(done, error=exc)
            return False
        write = _Write(agent, handle, num_bytes, done, time.monotonic())
        try:
            state = str(self._agent.transfer(handle))
        except Exception as exc:  # noqa: BLE001  a lost peer; part of the write may have been posted
            log.warning("KV write not posted", extra={"peer": agent, "cause": str(exc) or type(exc).__name__})
            state = "ERR"
        if not self._finished(write, state):
            self._writes.append(write)
        return bool(self._writes or self._failed)

    def _poll(self) -> float | None:
        self._writes = [w for w in self._writes if not self._finished(w, self._state(w))]
        self._failed = [w for w in self._failed if not self._gave_up(w)]
        if self._arrivals.begin_poll():
            self._make_progress()
            self._arrivals.poll()
        return self._patience()

    def _patience(self) -> float | None:
        return POLL_WRITES_S if self._writes or self._failed else self._arrivals.poll_interval_s()

    def _make_progress(self) -> None:
        """Over TCP bytes arrive only during a call of NIXL."""
        try:
            self._agent.get_new_notifs()
        except Exception as exc:  # noqa: BLE001  other writes need the thread
            log.warning("NIXL cannot be polled, trying again", extra={"cause": str(exc) or type(exc).__name__})

    def _state(self, write: _Write) -> str:
        try:
            return str(self._agent.check_xfer_state(write.handle))
        except Exception as exc:  # noqa: BLE001  a lost peer raises instead of returning a state
            log.warning("KV write failed", extra={"cause": str(exc) or type(exc).__name__})
            return "ERR"

    def _finished(self, write: _Write, state: str) -> bool:
        """Return False for a write that has not ended."""
        if state == "PROC":
            return False
        if state == "DONE":
            self._thread.settle(write.done, write.num_bytes)
            if self._is_between_gpus(write):
                self._slow.judge(write.agent, write.num_bytes, write.posted_s)
            with contextlib.suppress(Exception):  # nothing is in flight
                write.handle.release()
            return True
        if write.agent in self._peers:
            self._lost.add(write.agent)
        if not self._gave_up(write):
            if write.agent in self._peers:
                self._failed.append(write)
            else:  # the peer is disconnected
                self._thread.settle(write.done, error=TransferFailed(f"{write.agent} is gone"))
        return True

    def _is_between_gpus(self, write: _Write) -> bool:
        peer = self._peers.get(write.agent)
        return peer is not None and "cpu" not in {self._region.device, peer.endpoint.device}

    def _gave_up(self, write: _Write) -> bool:
        """Settle a failed write once NIXL has released its handle. Until then bytes may be in flight."""
        try:
            write.handle.release()
        except Exception:  # noqa: BLE001  active inside NIXL: tried again at the next poll
            return False
        self._thread.settle(write.done, error=TransferFailed("NIXL reports the write as failed; the peer is lost"))
        return True


def _in_posts(count: int, step: int, write: Callable[[slice], Awaitable[int]]) -> Awaitable[int]:
    """Post up to `step` of `count` parts at a time. Other writes may run between posts; each post checks its deadline."""
    return write(slice(None)) if count <= step else _one_by_one(count, step, write)


async def _one_by_one(count: int, step: int, write: Callable[[slice], Awaitable[int]]) -> int:
    moved = 0
    for first in range(0, count, step):
        if first:
            await asyncio.sleep(0)
        moved += await write(slice(first, first + step))
    return moved


def _memory_type(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return ("VRAM", int(index or 0)) if kind == "cuda" else ("DRAM", 0)


@asynccontextmanager
async def open_nixl(
    region: KvRegion, agent_name: str, backend: str = "UCX", max_request_pages: int = 0
) -> AsyncIterator[NixlTransfer]:
    transfer = NixlTransfer(region, agent_name, backend, max_request_pages)
    try:
        with new_listeners_logged():
            await transfer.start()
        yield transfer
    finally:
        await transfer.stop()


def open_nixl_plugin(
    region: KvRegion, agent_name: str, *, plugin: str, host: str, max_request_pages: int
) -> AbstractAsyncContextManager[NixlTransfer]:
    choose_devices(host)
    return open_nixl(region, agent_name, plugin or "UCX", max_request_pages)
