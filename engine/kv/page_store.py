"""Saves pages to files and loads them, beside the engine: threads do all that may wait for a disk or a network.

A page is copied between the pool and a *slot* of staging memory on the engine's thread, as any page is, and between the
slot and its file on another thread. So no page of the pool is ever busy with a file.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from shutil import disk_usage
from time import monotonic, perf_counter, sleep
from typing import Final

from components.errors import MeshError
from components.wire.layout import KvLayout
from engine.config import EngineConfig
from engine.kv.count import count_store_bytes
from engine.kv.offloaded_pages import CopyPages
from engine.kv.page_files import PageFiles

log = logging.getLogger(__name__)

LOADED_TOGETHER: Final = 16  # pages
LOAD_S: Final = 1.0  # how long a step waits for files; a worker is lost after 2 s of silence
CLOSE_S: Final = 5.0
MAX_UNSAVED: Final = 1 << 16  # blocks; of more, the oldest are not saved
SAVED_TOGETHER: Final = 32  # pages copied in one step, which waits for them
USED_AGAIN_S: Final = 60.0  # a prefix that is used more often is not recorded again
MAX_USED: Final = 1 << 12  # prefixes
MAX_QUEUED: Final = 32  # calls that the writer has not begun; behind more of them, no use is recorded
REPORT_S: Final = 60.0  # interval of warnings
FULL_LOOK_S: Final = 1e-3  # polling interval for a free slot


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory between the pool and files."""

    files: PageFiles
    slots: Sequence[memoryview]  # one page of all heads each; at least 2


def open_staging(config: EngineConfig, layout: KvLayout, slots: Sequence[memoryview]) -> Staging | None:
    """Open the files that the settings name, if any. Raises: WrongSettings."""
    if config.kv_store_dir is None:
        return None
    max_bytes = count_store_bytes(config, layout)
    files = PageFiles(config.kv_store_dir, layout, max_bytes)
    sizes = {"limit_gb": round(max_bytes / 1e9, 1), "free_gb": round(disk_usage(files.directory).free / 1e9, 1)}
    log.info("KV pages are saved to files", extra={"directory": str(files.directory), **sizes})
    return Staging(files, slots)


class PageStore:
    """Only the engine's thread may call methods."""

    def __init__(
        self, staging: Staging, first: int, page_of: Callable[[bytes], int | None], copy_pages: CopyPages
    ) -> None:
        """`first`: page id of the first slot. `page_of`: returns the page of a block in the prefix cache."""
        self._files = staging.files
        self._slots = staging.slots
        self._first = first
        self._page_of = page_of
        self._copy_pages = copy_pages
        loading = min(LOADED_TOGETHER, len(staging.slots) // 2)
        self._loading = range(loading)
        self._free = deque(range(loading, len(staging.slots)))  # for saving; the writer appends
        self._num_saving = len(self._free)
        self._unsaved: deque[tuple[bytes, float, int]] = deque(maxlen=MAX_UNSAVED)
        self._used: OrderedDict[bytes, float] = OrderedDict()  # last blocks of prefixes
        self._load: _Load | None = None  # the latest
        self._reader, self._writer = Background("kv store reader"), Background("kv store writer")
        self._warned_at = -REPORT_S
        self.num_loaded = 0
        self.num_saved = 0
        self.loading_s = 0.0  # time that the engine waited for files
        self._waited_s = 0.0  # of it in this step

    @property
    def num_unsaved(self) -> int:
        """Number of pages without a file yet, with those in slots."""
        return len(self._unsaved) + self._num_saving - len(self._free)

    def can_save(self) -> bool:
        return bool(self._unsaved and self._free)

    def load(self, blocks: Sequence[bytes], pages: Sequence[int]) -> int:
        """Fill pages of the pool. Returns: how many leading blocks were loaded, of those with files."""
        loaded = 0
        while loaded < len(blocks) and self._may_load():
            batch = blocks[loaded : loaded + len(self._loading)]
            self._load = load = _Load(self._files, batch, self._slots)
            self._reader.run(load)
            started = perf_counter()
            in_time = load.done.wait(LOAD_S - self._waited_s)
            waited_s = perf_counter() - started
            self.loading_s += waited_s
            self._waited_s += waited_s
            if not in_time:
                self._warn("KV page files are read too slowly; prompts are computed instead", None)
                break
            if load.error is not None:
                self._warn("cannot read KV page files; prompts are computed instead", load.error)
            found = range(load.num_read)
            if found:
                self._copy_pages([(self._first + slot, pages[loaded + slot]) for slot in found])
            loaded += load.num_read
            if load.num_read < len(batch):
                break
        self.num_loaded += loaded
        return loaded

    def used(self, blocks: Sequence[bytes], used_at: float) -> None:
        """Record that a prompt begins with these blocks, unless the writer is late: a disk may take longer than requests."""
        if not blocks:
            return
        last = self._used.get(blocks[-1])
        if (last is not None and used_at - last < USED_AGAIN_S) or self._writer.num_queued >= MAX_QUEUED:
            return
        self._writer.run(partial(self._changed, self._files.used, list(blocks), used_at))
        self._used[blocks[-1]] = used_at
        self._used.move_to_end(blocks[-1])
        if len(self._used) > MAX_USED:
            self._used.popitem(last=False)

    def add(self, blocks: Sequence[bytes], used_at: float, depth: int) -> None:
        """Let `save` save these blocks, which are in the prefix cache. `depth`: number of blocks before them."""
        self._unsaved.extend((block, used_at, at) for at, block in enumerate(blocks, depth))

    def save(self) -> None:
        """Copy pages that wait into free slots, from which the writer takes them. Call it at the end of each step."""
        self._waited_s = 0.0
        taken: list[tuple[int, Callable[[], None]]] = []
        moves: list[tuple[int, int]] = []
        while self.can_save() and len(moves) < SAVED_TOGETHER:
            block, used_at, depth = self._unsaved.popleft()
            page = self._page_of(block)
            if page is None:  # it was evicted
                continue
            slot = self._free.popleft()
            moves.append((page, self._first + slot))
            taken.append((slot, partial(self._write, slot, block, used_at, depth)))
        if not moves:
            return
        try:
            self._copy_pages(moves)
        except BaseException:
            self._free.extend(slot for slot, _ in taken)
            raise
        for _, write in taken:
            self._writer.run(write)

    def remove(self, blocks: Sequence[bytes]) -> None:
        """Delete files whose KV may be wrong."""
        gone = set(blocks)
        self._unsaved = deque((entry for entry in self._unsaved if entry[0] not in gone), MAX_UNSAVED)
        for block in blocks:
            self._writer.run(partial(self._changed, self._files.remove, block))

    def close(self) -> None:
        """Save what waits, for at most `CLOSE_S`."""
        until = monotonic() + CLOSE_S
        with suppress(MeshError, RuntimeError):  # the device or other ranks may be lost
            while self._unsaved and monotonic() < until:
                if self._free:
                    self.save()
                else:
                    sleep(FULL_LOOK_S)
        self._reader.close(0.0)  # nothing depends on it
        self._writer.close(until)

    def _may_load(self) -> bool:
        """Return whether this step has time left, and the files of an earlier one have arrived."""
        return self._waited_s < LOAD_S and (self._load is None or self._load.done.is_set())

    def _write(self, slot: int, block: bytes, used_at: float, depth: int) -> None:
        try:
            if self._changed(self._files.write, block, self._slots[slot], used_at, depth):
                self.num_saved += 1
        finally:
            self._free.append(slot)

    def _changed(self, change: Callable[..., bool | None], *args: object) -> bool:
        """Call `change` on the writer's thread. Returns: whether it wrote a file."""
        try:
            return bool(change(*args))
        except OSError as exc:
            self._warn("cannot write KV page files", exc)
            return False

    def _warn(self, text: str, error: OSError | None) -> None:
        now = monotonic()
        if now - self._warned_at >= REPORT_S:
            self._warned_at = now
            facts = {} if error is None else {"error": str(error)}
            log.warning(text, extra={"directory": str(self._files.directory), **facts})


class _Load:
    """Reads files of a batch into the first slots, on another thread."""

    def __init__(self, files: PageFiles, blocks: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        self._files = files
        self._blocks = blocks
        self._slots = slots
        self.num_read = 0
        self.error: OSError | None = None
        self.done = threading.Event()

    def __call__(self) -> None:
        try:
            for block, slot in zip(self._blocks, self._slots, strict=False):
                if not self._files.read(block, slot):
                    break
                self.num_read += 1
        except OSError as exc:
            self.error = exc
        finally:
            self.done.set()


class Background:
    """A thread that runs calls in order. An exit of the process does not wait for it, because a disk may not respond."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        return self._calls.qsize()

    def run(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def close(self, until: float) -> None:
        """Wait until all calls have run, at most until `until` of `monotonic`."""
        self._calls.put(None)
        self._thread.join(max(0.0, until - monotonic()))

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
