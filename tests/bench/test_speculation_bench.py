"""The bench of speculative decoding runs, and its answers are equal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S


@pytest.mark.model
def test_each_figure_has_both_ways_with_equal_tokens(real_model_dir: Path) -> None:
    options = ["--model", str(real_model_dir), "--compile", "off", "--output-len", "4"]
    few = ["--clients", "2", "--drafts", "4", "--temperature", "0", "--rounds", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "bench.speculation", *options, *few],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(line["figure"], line["questions"]) for line in lines] == [
        (figure, kind) for kind in ("chat", "rewrite") for figure in ("speculative decoding", "ratio of tokens/s")
    ]
    assert all(line.get("same_tokens", True) for line in lines)
