"""Sampling defaults from a model's `generation_config.json`."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    config = json.loads(path.read_text())
    if config.get("do_sample") is False:  # the authors mean greedy decoding; vLLM ignores this field
        return SamplingDefaults()
    temperature = config.get("temperature")  # 0: greedy
    return SamplingDefaults(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=float(config.get("top_p") or 1.0),
        top_k=int(config.get("top_k") or 0),
        min_p=float(config.get("min_p") or 0.0),
        repetition_penalty=float(config.get("repetition_penalty") or 1.0),
    )
