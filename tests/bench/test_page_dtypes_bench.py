"""The bench of pages of 8-bit floats measures both kinds, and rounding shows in the log-probabilities."""

from pathlib import Path

from tests.bench.figures import figures_of
from tests.components.text.tiny_model import tiny_tokenizer
from tests.engine.tiny_engine import save_tiny


def test_each_figure_has_both_dtypes(tmp_path: Path, state_home: Path) -> None:
    directory = save_tiny(tmp_path / "model", vocab_size=512)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    options = ["--model", str(directory), "--state-dir", str(state_home), "--compile", "off", "--rounds", "1"]
    few = ["--batch", "2", "--context", "64", "--prompt", "32", "--steps", "2", "--window", "64", "--texts", "3"]
    step, prompt, quality = figures_of("bench.page_dtypes", *options, *few)
    assert (step["figure"], step["batch"], step["context"]) == ("decode step", 2, 64)
    assert (prompt["figure"], prompt["tokens"]) == ("prompt", 32)
    assert all(line["ratio"] > 0 and line["ms_8_bits"] > 0 for line in (step, prompt))
    assert (quality["figure"], quality["tokens"]) == ("quality", 3 * 63)
    assert 0 < quality["mean_difference_of_logprobs"] < 1
    assert 0 < quality["same_most_likely_token"] < 1
