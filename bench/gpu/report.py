"""Prints JSON lines, and whether each target is met, missed or not measured."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Target(StrEnum):
    DECODE = "a decode step of 100 requests with 768 tokens of context, over its roofline"
    SAMPLED = "a step sampled with 0.6, top_p 0.95, top_k 20, over a greedy one"
    PROMPT = "prompts of 8,192 tokens, tokens/s"
    SKEW = "what one context of 60,000 adds to a step of 100 of 500, over the time to read its bytes"
    LOAD = "1,000 requests of up to 1,024 tokens in and out, 100 at a time, on one card: output tokens/s"
    SPLIT = "disaggregated output tokens/s over aggregated, on one card"
    SPLIT_TTFT = "disaggregated TTFT over aggregated, on one card"
    MOVED = "VRAM to VRAM for prompts of 1,024 tokens, GB/s"


STANDARD = vars(logging.makeLogRecord({})).keys()
LEVELS = {"engine": logging.INFO, "engine.compilation": logging.DEBUG}
AT_MOST = {Target.DECODE: 1.25, Target.SAMPLED: 1.15, Target.SKEW: 1.25, Target.SPLIT_TTFT: 1.1}
AT_LEAST = {Target.PROMPT: 65_000.0, Target.LOAD: 6_705.0, Target.SPLIT: 0.95, Target.MOVED: 200.0}


@dataclass(slots=True)
class Report:
    """Collects values. They are compared with targets only if `judged`, because these are for a GPU and Qwen3-4B."""

    judged: bool
    values: dict[Target, float] = field(default_factory=dict)

    def record(self, target: Target, value: float) -> None:
        self.values[target] = value

    def print_targets(self) -> None:
        for target in Target:
            wanted = {"at_most": AT_MOST[target]} if target in AT_MOST else {"at_least": AT_LEAST[target]}
            value = self.values.get(target)
            measured = {} if value is None else {"value": round(value, 3)}
            print_figure("target", what=str(target), **wanted, **measured, verdict=self._verdict(target, value))

    def _verdict(self, target: Target, value: float | None) -> str:
        if value is None:
            return "not measured"
        if not self.judged:
            return "not judged: a tiny model on a CPU"
        is_met = value <= AT_MOST[target] if target in AT_MOST else value >= AT_LEAST[target]
        return "met" if is_met else "missed"


def print_figure(figure: str, **facts: Any) -> None:
    print(json.dumps({"figure": figure, **facts}, default=str), flush=True)


class EngineLines(logging.Handler):
    """Converts log lines of the engine to figures: the division of the device's memory, and warnings with their facts.

    Tracebacks are written to stderr.
    """

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        facts = {name: value for name, value in vars(record).items() if name not in STANDARD}
        if message == "the device's memory is divided":
            print_figure(
                "memory of the device", **{n: v for n, v in facts.items() if n.endswith("_gb") or n == "pages"}
            )
        elif record.levelno >= logging.WARNING:
            print_figure("warning", message=message, **facts)
        elif record.exc_info:
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


@contextmanager
def engine_lines() -> Iterator[None]:
    handler, before = EngineLines(), {name: logging.getLogger(name).level for name in LEVELS}
    logging.getLogger("engine").addHandler(handler)
    try:
        for name, level in LEVELS.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        logging.getLogger("engine").removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
