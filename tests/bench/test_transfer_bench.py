"""bench.transfer with real processes: every way moves the bytes, and each figure follows from its times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from bench.transfer import figure, fixed, receiving
from bench.transfer_peer import Pool
from components.wire.layout import KvLayout
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[2]
LAYOUT: Final = KvLayout(model="bench", dtype="bfloat16", page_size=16, layers=2, kv_heads=2, head_dim=64)


def transfer(*args: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.transfer", *args]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_size_has_its_line_and_each_page_size_its_fixed_cost() -> None:
    shape = ["--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--rounds", "3"]
    lines = transfer(*shape, "--page-size", "16", "--page-size", "32", "--pages", "1", "--pages", "5")
    assert [(x["page_size"], x.get("pages"), x.get("figure")) for x in lines] == [
        (16, 1, None),
        (16, 5, None),
        (16, None, "fixed cost"),
        (32, 1, None),
        (32, 5, None),
        (32, None, "fixed cost"),
    ]
    assert lines[1]["bytes"] == 5 * LAYOUT.page_bytes
    assert all(x[f"{way}_us"] > 0 for x in lines[:2] for way in ("scattered", "neighbours", "nixl", "memcpy"))
    assert all(x[f"{way}_us"] > 0 for x in (lines[2], lines[5]) for way in ("aux", "after_aux"))


def test_ratios_are_of_times_and_speeds_of_bytes() -> None:
    line = figure(LAYOUT, 2, {"scattered": 64.0, "neighbours": 32.768, "nixl": 32.0, "memcpy": 16.0})
    assert line["bytes"] == 32768
    assert (line["scattered_over_nixl"], line["scattered_over_memcpy"], line["neighbours_over_nixl"]) == (
        2.0,
        4.0,
        1.02,
    )
    assert line["neighbours_gb_s"] == 1.0
    told = fixed(LAYOUT, {"scattered": 64.0, "nixl": 32.0, "memcpy": 16.0, "aux": 5.0, "after_aux": 70.0})
    assert (told["scattered_fixed_us"], told["nixl_fixed_us"], told["aux_us"]) == (48.0, 16.0, 5.0)


def test_a_receiver_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="the receiving process ended with 1"), receiving(LAYOUT, -1, ""):
        pytest.fail("it cannot have started")
    assert Pool(LAYOUT, 2).memory.shape == (2, LAYOUT.page_bytes)
