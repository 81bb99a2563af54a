"""Compiled C++ that is damaged, in a directory that cannot be written, or cannot be made."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

import pytest

from engine.kernels import native_library
from engine.kernels.native_library import KernelsUnavailable

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def loaded(source: Path) -> int:
    found: list[ctypes.CDLL] = []
    native_library._load("tiny", [source], ("-O0",), (), source.parent, lambda path: found.append(ctypes.CDLL(path)))
    answer: int = found[-1].answer()
    return answer


@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_library_is_compiled_again(source: Path, left: int) -> None:
    """After a power failure it was short, and no start replaced it."""
    library = source.parent / "compile" / f"tiny-{'0' * 16}.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "fingerprint", lambda _facts: "0" * 16)
        library.parent.mkdir()
        library.write_bytes(b"x" * left)
        assert loaded(source) == 42
        assert library.stat().st_size > 1000


def test_a_library_in_a_directory_that_cannot_be_written_is_used(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening its lock fails on a read-only mount, and in a directory of another user."""
    assert loaded(source) == 42

    def read_only(_path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(native_library, "locked", read_only)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert loaded(source) == 42


def test_the_linker_s_error_is_reported_and_not_its_count() -> None:
    """A full disk was reported as a wrong compiler."""
    full = ["/usr/bin/ld: final link failed: No space left on device", "collect2: error: ld returned 1 exit status"]
    assert native_library._first_error(full) == full[0]
    wrong = ["In file included from a.h:", "a.cpp:1:1: error: expected", "a.cpp:2:1: error: more"]
    assert native_library._first_error(wrong) == wrong[1]
    assert not native_library._first_error([])


def test_without_a_compiler_it_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler no-such-compiler: install it or set CXX"):
        loaded(source)
