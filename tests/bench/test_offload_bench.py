"""The bench of evicted pages runs with equal answers, and restores kept pages."""

from pathlib import Path

import pytest

from tests.bench.figures import figures_of


@pytest.mark.model
def test_each_way_is_measured_with_equal_tokens(real_model_dir: Path, tmp_path: Path) -> None:
    options = ["--model", str(real_model_dir), "--compile", "off", "--directory", str(tmp_path), "--rounds", "1"]
    few = ["--conversations", "4", "--length", "64", "--turns", "2", "--answer", "2"]
    lines = figures_of("bench.offload", *options, *few)
    visits = [line for line in lines if line["figure"] == "returning conversations"]
    assert all(line["same_tokens"] for line in visits)
    ways = ["evicted pages are gone", "in main memory", "in files", "in files, after a restart", "none is evicted"]
    assert [line["pages"] for line in lines] == [*ways, *ways]
    assert [line["restored_pages"] > 0 for line in visits] == [False, True, True, True, False]
    assert [line["cached"] > 0.5 for line in visits] == [False, True, True, True, True]
