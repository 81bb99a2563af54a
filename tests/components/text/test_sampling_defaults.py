import json
from pathlib import Path
from typing import Any

import pytest

from components.text.sampling_defaults import SamplingDefaults, read_sampling_defaults

GIVEN = {"temperature": 0.15, "top_p": 0.9}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": True, **GIVEN}, SamplingDefaults(temperature=0.15, top_p=0.9)),
        (GIVEN, SamplingDefaults(temperature=0.15, top_p=0.9)),
        ({"do_sample": False, **GIVEN}, SamplingDefaults()),
        ({"temperature": 0}, SamplingDefaults(temperature=0.0)),
        ({"temperature": None, "top_k": 20}, SamplingDefaults(top_k=20)),
    ],
)
def test_what_the_model_s_makers_recommend_is_the_default_unless_they_mean_greedy_decoding(
    config: dict[str, Any], expected: SamplingDefaults, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_sampling_defaults(tmp_path) == expected


def test_a_model_without_the_file_has_openai_s_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
