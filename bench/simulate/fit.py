"""Fits the mock engine's cost model to lines of `bench.engine`."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.config import EngineConfig, MockConfig, attended

STEP_TOKENS: Final = EngineConfig().step_size("cpu").tokens  # of the measured engine


@dataclass(frozen=True, slots=True)
class Fit:
    cost: MockConfig
    decode_error: float  # largest relative error
    prompt_error: float


def fit_file(path: Path, label: str | None = None, step_tokens: int = STEP_TOKENS) -> Fit:
    """Fit to the lines of a file, if `label` is set only to those with it. Raises: ValueError, OSError."""
    with path.open() as lines:
        try:
            return fit((json.loads(line) for line in lines if line.strip()), label, step_tokens)
        except (LookupError, TypeError, AttributeError) as exc:
            raise ValueError(f"a line is not of bench.engine: {type(exc).__name__}: {exc}") from exc


def fit(lines: Iterable[dict[str, Any]], label: str | None = None, step_tokens: int = STEP_TOKENS) -> Fit:
    """Fit by least squares of relative errors of medians, without negative constants.

    Decode steps give `step_s`, `decode_s` and `context_token_s`; prompts give `prompt_token_s` and `attention_s`.
    Raises: ValueError, if there are too few lines, or several labels and `label` is not set.
    """
    chosen = [line for line in lines if line.get("figure") in {"decode step", "prompt"}]
    labels = sorted({str(line.get("label", "")) for line in chosen})
    if label is None and len(labels) > 1:
        raise ValueError(f"there are several labels, choose one: {', '.join(labels)}")
    chosen = [line for line in chosen if label is None or line.get("label") == label]
    decodes = [line for line in chosen if line["figure"] == "decode step"]
    prompts = [line for line in chosen if line["figure"] == "prompt"]
    if len(decodes) < 2 or not prompts:
        raise ValueError(f"{len(decodes)} decode steps and {len(prompts)} prompts; at least 2 and 1 are needed")
    rows = [[1.0, line["batch"], line["batch"] * line["context"]] for line in decodes]
    (step_s, decode_s, context_s), decode_error = _solve(rows, [line["ms_p50"] / 1000 for line in decodes])
    shapes = [(int(line["tokens"]), math.ceil(line["tokens"] / step_tokens)) for line in prompts]
    work_s = [line["ms_p50"] / 1000 - steps * step_s for line, (_, steps) in zip(prompts, shapes, strict=True)]
    rows = [[float(tokens), float(attended(0, tokens))] for tokens, _ in shapes]
    (prompt_s, attention_s), prompt_error = _solve(rows, [max(0.0, work) for work in work_s])
    cost = MockConfig(
        step_s=step_s,
        decode_s=decode_s,
        context_token_s=context_s,
        prompt_token_s=prompt_s,
        attention_s=attention_s,
    )
    return Fit(cost, decode_error, prompt_error)


def _solve(rows: list[list[float]], times_s: list[float]) -> tuple[list[float], float]:
    """Try every subset of the few constants. Return the constants and the largest relative error."""
    weights = 1 / np.maximum(np.array(times_s), 1e-9)
    matrix = np.array(rows) * weights[:, None]
    best, least = [0.0] * len(rows[0]), math.inf
    for columns in _subsets(len(rows[0])):
        found = np.linalg.lstsq(matrix[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (found < 0).any():
            continue
        wrong = float(((matrix[:, columns] @ found - 1) ** 2).sum())
        if wrong < least - 1e-12:  # of equally good ones, choose the one with fewer constants
            least = wrong
            best = [0.0] * len(rows[0])
            for column, value in zip(columns, found, strict=True):
                best[column] = float(value)
    return best, float(np.abs(matrix @ np.array(best) - 1).max())


def _subsets(count: int) -> Iterator[list[int]]:
    for size in range(1, count + 1):
        yield from (list(columns) for columns in itertools.combinations(range(count), size))
