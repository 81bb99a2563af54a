"""Pages on their way to and from files: the engine's thread never waits long for a disk, and no page is lost or mixed up."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest

from components.errors import InvariantBroken
from components.wire.layout import KvLayout
from engine.config import EngineConfig
from engine.kv import page_store
from engine.kv.page_files import PageFiles
from engine.kv.page_store import PageStore, Staging, open_staging
from tests.waiting import wait_until

LAYOUT = KvLayout(model="m", dtype="float16", page_size=16, layers=1, kv_heads=1, head_dim=8)
POOL = 40


class Memory:
    """A pool of 40 pages, with the slots after it."""

    def __init__(self, num_slots: int) -> None:
        self.pages = [bytearray(LAYOUT.page_bytes) for _ in range(POOL + num_slots)]
        self.page_of: dict[bytes, int] = {}

    def fill(self, page: int) -> bytes:
        """Fill a page of the pool, and put it into the prefix cache."""
        self.pages[page][:] = bytes([page]) * LAYOUT.page_bytes
        self.page_of[block(page)] = page
        return block(page)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self.pages[target][:] = self.pages[source]

    def contents(self, page: int) -> int:
        (only,) = set(self.pages[page])
        return only


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


@contextmanager
def opened(root: Path, memory: Memory) -> Iterator[PageStore]:
    files = PageFiles(root, LAYOUT, 10**9)
    store = PageStore(
        Staging(files, [memoryview(page) for page in memory.pages[POOL:]]), POOL, memory.page_of.get, memory.copy
    )
    try:
        yield store
    finally:
        store.close()


def save(root: Path, numbers: range, num_slots: int = 64) -> None:
    memory = Memory(num_slots)
    with opened(root, memory) as store:
        store.add([memory.fill(number) for number in numbers], time(), 0)


@pytest.mark.parametrize("num_slots", [2, 8, 64])
def test_pages_come_back_in_order_whatever_the_number_of_slots(tmp_path: Path, num_slots: int) -> None:
    save(tmp_path, range(35), num_slots)
    memory = Memory(num_slots)
    targets = list(reversed(range(POOL)))
    with opened(tmp_path, memory) as store:
        assert store.load([block(number) for number in range(40)], targets) == 35
        assert store.num_loaded == 35
    assert [memory.contents(page) for page in targets[:35]] == list(range(35))


def test_loading_ends_at_the_first_block_without_a_file(tmp_path: Path) -> None:
    save(tmp_path, range(10))
    memory = Memory(64)
    with opened(tmp_path, memory) as store:
        assert store.load([block(number) for number in (0, 1, 39, 2)], [0, 1, 2, 3]) == 2
        assert store.load([block(39)], [5]) == 0
        assert memory.contents(3) == 0


def test_a_page_that_was_evicted_before_its_turn_is_not_saved(tmp_path: Path) -> None:
    memory = Memory(64)
    with opened(tmp_path, memory) as store:
        blocks = [memory.fill(number) for number in range(3)]
        store.add(blocks, time(), 0)
        del memory.page_of[blocks[1]]
        memory.pages[1][:] = b"x" * LAYOUT.page_bytes
    with opened(tmp_path, memory) as store:
        assert store.load(blocks, [7, 8, 9]) == 1
        assert store.load(blocks[2:], [9]) == 1
        assert store.load(blocks[1:2], [8]) == 0


def test_a_page_may_be_evicted_as_soon_as_it_is_in_a_slot(tmp_path: Path) -> None:
    memory = Memory(64)
    with opened(tmp_path, memory) as store:
        blocks = [memory.fill(number) for number in range(1, 4)]
        store.add(blocks, time(), 0)
        store.save()
        for page in range(POOL):
            memory.pages[page][:] = b"x" * LAYOUT.page_bytes
    with opened(tmp_path, memory) as store:
        assert store.load(blocks, [7, 8, 9]) == 3
    assert [memory.contents(page) for page in (7, 8, 9)] == [1, 2, 3]


def test_a_slow_disk_delays_a_prompt_once_and_is_used_again_when_it_responds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system of a network may hang for minutes. Its late bytes go to a slot, never to a page."""
    save(tmp_path, range(4))
    monkeypatch.setattr(page_store, "LOAD_S", 0.01)
    responds, read = threading.Event(), PageFiles.read
    monkeypatch.setattr(PageFiles, "read", lambda *args: responds.wait() and read(*args))
    memory = Memory(64)
    blocks = [block(number) for number in range(4)]
    with opened(tmp_path, memory) as store:
        assert store.load(blocks, [10, 11, 12, 13]) == 0
        waited_s = store.loading_s
        assert store.load(blocks, [10, 11, 12, 13]) == 0
        assert store.loading_s == waited_s, "the engine waits for the disk again"
        monkeypatch.setattr(page_store, "LOAD_S", 30.0)
        responds.set()
        wait_until(lambda: store.load(blocks, [20, 21, 22, 23]) == 4)
    assert [memory.contents(page) for page in (10, 11, 20, 23)] == [0, 0, 0, 3]
    assert caplog.text.count("KV page files are read too slowly") == 1


def test_a_step_waits_for_a_slow_disk_one_second_whatever_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited a second for each 16 files and each request. So a long prompt stopped the engine for a minute, and other
    processes took the worker for dead."""
    save(tmp_path, range(40))
    now_s, read = 0.0, PageFiles.read

    def slowly(*args: Any) -> bool:
        nonlocal now_s
        now_s += 0.04
        return read(*args)

    monkeypatch.setattr(page_store, "perf_counter", lambda: now_s)
    monkeypatch.setattr(PageFiles, "read", slowly)
    blocks = [block(number) for number in range(40)]
    with opened(tmp_path, Memory(64)) as store:
        assert store.load(blocks, range(40)) == 32
        assert store.load(blocks[:1], [0]) == 0
        store.save()  # the next step
        assert store.load(blocks[32:], range(32, 40)) == 8


@pytest.mark.parametrize("method", ["read", "write"])
def test_errors_of_a_disk_cost_the_files_only(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if method == "read":
        save(tmp_path, range(4))

    def broken(*_args: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(PageFiles, method, broken)
    save(tmp_path, range(4))
    with opened(tmp_path, Memory(64)) as store:
        assert store.load([block(0)], [0]) == 0
    assert f"cannot {method} KV page files" in caplog.text


def test_slots_are_free_again_after_an_error_of_the_copy(tmp_path: Path) -> None:
    memory = Memory(8)
    with opened(tmp_path, memory) as store:
        store.add([memory.fill(number) for number in range(4)], time(), 0)

        def lost(_moves: object) -> None:
            raise InvariantBroken("rank 1 ended")

        copy, store._copy_pages = store._copy_pages, lost
        with pytest.raises(InvariantBroken):
            store.save()
        store._copy_pages = copy
        store.add([memory.fill(number) for number in range(4)], time(), 0)
    assert store.num_saved == 4


def test_pages_whose_kv_may_be_wrong_are_deleted_and_not_saved(tmp_path: Path) -> None:
    memory = Memory(64)
    with opened(tmp_path, memory) as store:
        blocks = [memory.fill(number) for number in range(6)]
        store.add(blocks[:3], time(), 0)
        store.save()
        store.add(blocks[3:], time(), 3)
        store.remove(blocks[2:5])
    with opened(tmp_path, memory) as store:
        loaded = [store.load([each], [0]) for each in blocks]
    assert loaded == [1, 1, 0, 0, 0, 1]


def test_a_use_is_recorded_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[float] = []
    monkeypatch.setattr(PageFiles, "used", lambda _files, _blocks, used_at: recorded.append(used_at))
    with opened(tmp_path, Memory(8)) as store:
        for used_at in (100.0, 130.0, 159.0, 160.0, 170.0):
            store.used([block(1), block(2)], used_at)
        store.used([block(1)], 170.0)
        store.used([], 180.0)
    assert recorded == [100.0, 160.0, 170.0]


def test_uses_do_not_queue_up_behind_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system takes a message for each block. So requests queued more than it could record, and pages
    were saved later and later."""
    responds = threading.Event()
    recorded: list[bytes] = []

    def used(_files: PageFiles, blocks: Sequence[bytes], _used_at: float) -> None:
        responds.wait()
        recorded.extend(blocks)

    monkeypatch.setattr(PageFiles, "used", used)
    with opened(tmp_path, Memory(8)) as store:
        for number in range(1000):
            store.used([block(number)], 100.0)
        responds.set()
        wait_until(lambda: len(recorded) >= page_store.MAX_QUEUED)
        wait_until(lambda: not store._writer.num_queued)
        store.used([block(999)], 101.0)
    assert len(recorded) <= page_store.MAX_QUEUED + 2
    assert recorded[-1] == block(999)


def test_closing_saves_what_waits_but_not_on_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(4)
    with opened(tmp_path, memory) as store:
        store.add([memory.fill(number) for number in range(30)], time(), 0)
    assert store.num_saved == 30
    hangs = threading.Event()
    monkeypatch.setattr(PageFiles, "write", lambda *_args: hangs.wait())
    monkeypatch.setattr(page_store, "CLOSE_S", 0.05)
    with opened(tmp_path / "other", memory) as store:
        store.add([memory.fill(number) for number in range(30)], time(), 0)
    assert store.num_saved == 0
    hangs.set()


def test_closing_does_not_wait_for_files_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker of a mesh with such a disk took five seconds to end, one after the other."""
    hangs = threading.Event()
    monkeypatch.setattr(PageFiles, "read", lambda *_args: hangs.wait())
    monkeypatch.setattr(page_store, "LOAD_S", 0.01)
    monkeypatch.setattr(page_store, "CLOSE_S", 300.0)
    with opened(tmp_path, Memory(4)) as store:
        assert store.load([block(1)], [1]) == 0
    hangs.set()


def test_settings_open_a_store(tmp_path: Path) -> None:
    slots: list[memoryview] = []
    assert open_staging(EngineConfig(), LAYOUT, slots) is None
    opened = open_staging(EngineConfig(kv_store_dir=tmp_path), LAYOUT, slots)
    assert opened is not None
    assert opened.files.directory.parent == tmp_path
    with pytest.raises(ValueError, match=r"kv_store_gb is 5\.0, so kv_store_dir must say where the files are"):
        EngineConfig(kv_store_gb=5.0)
