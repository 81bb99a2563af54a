"""Pages in files: what comes back is what was written, and the oldest files are deleted first."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from components.startup import WrongSettings
from components.wire.layout import KvLayout, of_shard
from engine.kv.page_files import HEAD, NAMES, PageFiles, _files, directory_name

LAYOUT = KvLayout(model="org/m@1234", dtype="bfloat16", page_size=16, layers=3, kv_heads=2, head_dim=8)
NOW = 1_700_000_000.0
FILE_BYTES = HEAD.size + LAYOUT.page_bytes


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page(number: int) -> memoryview:
    half = LAYOUT.page_bytes // 2
    return memoryview(bytes([number]) * half + bytes([number + 1]) * half)


def empty_page() -> memoryview:
    return memoryview(bytearray(LAYOUT.page_bytes))


def open_files(root: Path, num_pages: int = 1000) -> PageFiles:
    return PageFiles(root, LAYOUT, num_pages * FILE_BYTES)


def there(files: PageFiles, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if files.read(block(number), empty_page())]


def path_of(root: Path, number: int) -> Path:
    (found,) = root.rglob(block(number).hex())
    return found


def test_a_page_comes_back_whole_in_another_process(tmp_path: Path) -> None:
    assert open_files(tmp_path).write(block(7), page(7), NOW, 0)
    found = empty_page()
    assert open_files(tmp_path).read(block(7), found)
    assert found == page(7)


def test_a_page_is_written_once(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    assert [files.write(block(7), page(7), NOW, 0) for _ in range(2)] == [True, False]
    assert not files.read(block(8), empty_page())


def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    """Prompts can be derived from their KV."""
    files = open_files(tmp_path / "store")
    files.write(block(7), page(7), NOW, 0)
    path = path_of(tmp_path, 7)
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.directory.stat().st_mode & path.parent.stat().st_mode & 0o777 == 0o700


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def rename(path: Path) -> None:
    """Give it the contents of another block."""
    other = path.with_name(block(9).hex())
    other.rename(path)


@pytest.mark.parametrize("damage", [cut, flip, rename])
def test_a_damaged_file_is_deleted_and_never_used(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(tmp_path)
    for number in (7, 9):
        files.write(block(number), page(number), NOW, 0)
    path = path_of(tmp_path, 7)
    damage(path)
    assert not files.read(block(7), empty_page())
    assert not path.exists()
    assert "a damaged KV page file is deleted" in caplog.text
    assert files.write(block(7), page(7), NOW, 0)


def test_the_pages_that_were_not_used_for_the_longest_time_are_deleted(tmp_path: Path) -> None:
    files = open_files(tmp_path, num_pages=32)
    for number in range(30):
        files.write(block(number), page(number), NOW + number, 0)
    files.used([block(0)], NOW + 100)
    for number in range(30, 40):
        files.write(block(number), page(number), NOW + number, 0)
    left = there(files, range(40))
    assert left[0] == 0
    assert left[1:] == list(range(40 - len(left) + 1, 40))
    assert 28 <= len(left) <= 34


def test_a_prompts_first_block_is_deleted_last(tmp_path: Path) -> None:
    """Peers deleted it first, because it is the oldest, and so lost the use of all others."""
    files = open_files(tmp_path, num_pages=32)
    for depth in range(40):  # all blocks of one request
        files.write(block(depth), page(depth), NOW, depth)
    left = there(files, range(40))
    assert left[:20] == list(range(20))


def test_the_limit_counts_the_files_of_all_layouts(tmp_path: Path) -> None:
    other = PageFiles(tmp_path, replace(LAYOUT, page_size=32), 32 * FILE_BYTES)
    assert other.directory != open_files(tmp_path).directory
    for number in range(20):
        other.write(block(number), memoryview(bytes(2 * LAYOUT.page_bytes)), NOW, number)
    files = open_files(tmp_path, num_pages=32)
    for number in range(8):
        files.write(block(number), page(number), NOW + 1, number)
    assert there(files, range(8)) == list(range(8))
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 34 * FILE_BYTES


def test_ranks_of_any_number_share_files_but_other_weights_do_not() -> None:
    names = {directory_name(of_shard(LAYOUT, 0, shards)) for shards in (1, 2)}
    assert len(names) == 1
    assert names.pop().startswith("org_m_1234-")
    for change in ({"model": "org/m@4321"}, {"dtype": "float16"}, {"page_size": 32}, {"layers": 4}, {"head_dim": 16}):
        assert directory_name(replace(LAYOUT, **change)) != directory_name(LAYOUT)


def test_unfinished_files_of_writers_that_have_ended_are_deleted(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write(block(1), page(1), NOW, 0)
    path = path_of(tmp_path, 1)
    abandoned, recent = (path.with_name(f"{path.name}.{token}.part") for token in ("0123abcd", "4567abcd"))
    for unfinished in (abandoned, recent):
        unfinished.touch()
    an_hour_ago = time.time() - 3600
    os.utime(abandoned, (an_hour_ago, an_hour_ago))
    open_files(tmp_path).write(block(2), page(2), NOW, 0)
    assert (abandoned.exists(), recent.exists()) == (False, True)


def test_files_that_are_not_ours_are_never_deleted(tmp_path: Path) -> None:
    """A directory with a user's own files counted them, and deleted the oldest ones."""
    own = [
        tmp_path / name for name in ("thesis.tex", "photos/2019/a.jpg", f"photos/{block(3).hex()}", "kv/ab/1234.part")
    ]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(40 * FILE_BYTES))
        os.utime(path, (1.0, 1.0))
    files = open_files(tmp_path, num_pages=32)
    for number in range(40):
        files.write(block(number), page(number), NOW + number, 0)
    assert all(path.exists() for path in own)
    assert len(there(files, range(40))) >= 28


def test_directories_that_this_user_cannot_read_do_not_end_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as lost+found of a disk, or the pages of another user's workers."""
    other = PageFiles(tmp_path, replace(LAYOUT, page_size=32), 32 * FILE_BYTES).directory
    scandir = os.scandir

    def scan(path: str | Path) -> object:
        if Path(path) == other:  # root may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert open_files(tmp_path).write(block(1), page(1), NOW, 0)


def test_files_may_vanish_while_a_worker_looks_for_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker deletes old files, and renames those that it has written."""
    files = open_files(tmp_path)
    for number in range(5):
        files.write(block(number), page(number), NOW, 0)
    path = path_of(tmp_path, 3)
    fullmatch = NAMES[2].fullmatch

    class Racing:
        """Deletes a file after a scan has named it."""

        @staticmethod
        def fullmatch(name: str) -> object:
            if name == path.name:
                path.unlink(missing_ok=True)
            return fullmatch(name)

    monkeypatch.setattr(_files, "__defaults__", ((*NAMES[:2], Racing),))
    assert open_files(tmp_path).write(block(9), page(9), NOW, 0)
    assert not path.exists()
    assert there(files, range(10)) == [0, 1, 2, 4, 9]


def test_a_file_that_cannot_be_deleted_leaves_the_others_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path, num_pages=32)
    for number in range(31):
        files.write(block(number), page(number), NOW + number, 0)
    kept, unlink = path_of(tmp_path, 0), Path.unlink

    def denied(path: Path, missing_ok: bool = False) -> None:
        if path == kept:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", denied)
    for number in range(31, 40):
        files.write(block(number), page(number), NOW + number, 0)
    left = there(files, range(40))
    assert left[0] == 0
    assert 28 <= len(left) <= 34


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_another_name_makes_room_too(
    tmp_path: Path, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was deleted if a file could not even be created, so nothing was saved any more.

    The page itself was lost, and with it the use of the prompt's later pages.
    """
    files = open_files(tmp_path)
    for number in range(32):
        files.write(block(number), page(number), NOW + number, 0)
    open_file = os.open

    def no_inodes(path: Path, flags: int, *args: int) -> int:
        if flags & os.O_CREAT and len(there(files, range(32))) == 32:
            raise OSError(full, os.strerror(full))
        return open_file(path, flags, *args)

    monkeypatch.setattr(os, "open", no_inodes)
    assert files.write(block(99), page(99), NOW + 99, 0)
    assert there(files, range(100)) == [*range(2, 32), 99]


def test_a_full_disk_makes_room_and_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path)
    for number in range(32):
        files.write(block(number), page(number), NOW + number, 0)
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, parts[:1]))
    with pytest.raises(OSError, match="No space left") as raised:
        files.write(block(99), page(99), NOW, 0)
    assert raised.value.errno == errno.ENOSPC
    assert there(files, range(100)) == list(range(2, 32))
    assert not list(tmp_path.rglob("*.part"))


def test_files_come_back_after_their_directory_was_removed(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.directory.rmdir()
    assert files.write(block(1), page(1), NOW, 0)
    files.remove(block(1))
    assert there(files, [1]) == []


def test_a_home_directory_that_does_not_exist_is_a_wrong_setting() -> None:
    with pytest.raises(WrongSettings, match=r"setting engine\.kv_store_dir: ~nosuchuser/kv names no directory: "):
        open_files(Path("~nosuchuser/kv"))


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    make(root)
    if root.is_dir():

        def denied(*_args: object) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root may write everywhere

        monkeypatch.setattr(os, "open", denied)
    with pytest.raises(WrongSettings, match=f"setting engine.kv_store_dir: cannot write KV pages to {root}: "):
        open_files(root)
