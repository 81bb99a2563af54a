import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.end_tokens import read_end_tokens


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": [3, 4]}}, {3, 4}),
        ({"config.json": {"eos_token_id": [2, 5]}, "generation_config.json": {"do_sample": True}}, {2, 5}),
        ({"config.json": {"text_config": {"eos_token_id": 7}}}, {7}),
        (
            {
                "config.json": {"eos_token_id": 2},
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|im_end|>"}]},
            },
            {2, 9},
        ),
        ({"config.json": {}}, set()),
        ({}, set()),
    ],
)
def test_end_tokens_are_read_without_the_model(tmp_path: Path, files: dict[str, Any], ends: set[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_end_tokens(tmp_path) == ends
