"""The tests for a device, and the error without one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.device import ON_CPU_ALONE, ON_DEVICE, RECORDS, TESTED, VARIABLE, choose_device, is_for_cpu

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDS, "graphs", RECORDS["graphs"])
    # a chosen device sets it, and processes of later tests would inherit it
    monkeypatch.setenv("UCX_CUDA_IPC_CACHE", "n")


def choose(device: str | None, markers: str, *, graphs: bool = False) -> None:
    given = {"--device": device, "--graphs": graphs}
    config = SimpleNamespace(getoption=given.__getitem__, option=SimpleNamespace(markexpr=markers))
    choose_device(config)


def test_the_files_for_a_device_are_there() -> None:
    assert [name for name in ON_DEVICE if not (REPO / name).is_file()] == []
    tests = "".join((REPO / name).read_text() for name in ON_DEVICE)
    assert [name for name in ON_CPU_ALONE if f"def {name}(" not in tests] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pytest", True),
        ("pytest -q tests/engine -m mesh", True),
        ("pytest -m gpu", False),
        ("pytest -m gpu --device=cpu", True),
        ("pytest -m gpu --device cpu -x", True),
        ("pytest -m gpu --device simulated", True),
        ("pytest --device cuda:1 -m gpu", False),
    ],
)
def test_how_triton_runs_is_known_from_the_command_line(line: str, expected: bool) -> None:
    assert is_for_cpu(line.split()) == expected


@pytest.mark.parametrize(("device", "markers"), [(None, "gpu"), ("cuda:0", "gpu"), ("cuda", "gpu or gpu_bench")])
def test_without_the_device_nothing_runs(device: str | None, markers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.UsageError, match=r"there is no device cuda.* finds 0 CUDA devices"):
        choose(device, markers)
    assert TESTED == {"device": "cpu"}


def test_a_device_is_for_the_tests_that_are_marked() -> None:
    with pytest.raises(pytest.UsageError, match="add -m gpu"):
        choose("cuda:0", "not soak and not gpu_bench")


def test_graphs_are_refused_where_nothing_can_record_them() -> None:
    for device, markers in (("cpu", "gpu"), (None, "not soak")):
        with pytest.raises(pytest.UsageError, match="--graphs is for a device"):
            choose(device, markers, graphs=True)


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(VARIABLE, "cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(TESTED, "device", "cpu")
    choose("cuda:1", "gpu", graphs=True)
    assert TESTED == {"device": "cuda:1"}
    assert RECORDS["graphs"]
    with pytest.raises(pytest.UsageError, match="no device cuda:2 here"):
        choose("cuda:2", "gpu")
