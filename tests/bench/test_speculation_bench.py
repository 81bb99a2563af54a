"""The bench of speculative decoding runs, with equal answers."""

from pathlib import Path

import pytest

from tests.bench.figures import figures_of


@pytest.mark.model
def test_each_figure_has_both_ways_with_equal_tokens(real_model_dir: Path) -> None:
    options = ["--model", str(real_model_dir), "--compile", "off", "--output-len", "4"]
    few = ["--clients", "2", "--drafts", "4", "--temperature", "0", "--rounds", "1"]
    lines = figures_of("bench.speculation", *options, *few)
    assert [(line["figure"], line["questions"]) for line in lines] == [
        (figure, kind)
        for kind in ("chat", "rewrite", "predicted")
        for figure in ("speculative decoding", "ratio of tokens/s")
    ]
    assert all(line.get("same_tokens", True) for line in lines)
