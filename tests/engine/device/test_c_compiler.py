import sys
import sysconfig
from pathlib import Path

import pytest

from engine.device.c_compiler import find_c_compiler


def with_headers(monkeypatch: pytest.MonkeyPatch, include: Path, *, default: str = "posix_prefix") -> None:
    elsewhere = {"posix_prefix": str(include), "posix_local": "/nowhere"}
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: default)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": elsewhere[scheme]})


def test_a_compiler_without_pythons_headers_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's first launch failed with CalledProcessError, and the engine died: Debian's python3 has no headers."""
    monkeypatch.setenv("CC", sys.executable)
    with_headers(monkeypatch, tmp_path)
    assert find_c_compiler() is None
    (tmp_path / "Python.h").touch()
    assert find_c_compiler() == sys.executable
    with_headers(monkeypatch, tmp_path, default="posix_local")
    assert find_c_compiler() == sys.executable


def test_without_a_compiler_headers_are_no_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").touch()
    with_headers(monkeypatch, tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_c_compiler() is None
