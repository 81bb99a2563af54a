"""Traces in Mooncake's format: one JSON object a line, equal hash ids for equal blocks.

`timestamp` is in ms; each of `hash_ids` stands for 512 tokens and all before them. Source: Qin et al., FAST 2025,
arXiv:2407.00079.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.load.workloads import Ask, words

BLOCK: Final = 512  # tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int | None = None) -> Iterator[TraceRequest]:
    """Raises: ValueError, naming the line that is wrong; OSError."""
    found = 0
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if count is not None and found >= count:
                break
            if not line.strip():
                continue
            try:
                request = _parse(line)
            except (ValueError, LookupError, TypeError, AttributeError) as exc:
                raise ValueError(f"{path}:{number} is not a request of a trace: {type(exc).__name__}: {exc}") from exc
            found += 1
            yield request
    if not found:
        raise ValueError(f"{path} has no requests")


def trace_asks(path: Path, count: int | None, scale: float, speed: float, salt: int) -> list[Ask]:
    """Requests of the trace in `path`.

    Args:
        count: None takes all.
        scale: of lengths and blocks, so that cached shares stay the same.
        speed: of arrivals; 2 is twice as fast.
        salt: seed of the blocks' words, with their ids.
    Raises: ValueError, naming the line that is wrong; OSError.
    """
    return [_ask(request, scale, speed, salt) for request in read_trace(path, count)]


def _parse(line: str) -> TraceRequest:
    fields = json.loads(line)
    ids = [int(block) for block in fields["hash_ids"]]
    length = int(fields["input_length"])
    if len(ids) * BLOCK < length:
        raise ValueError(f"{len(ids)} blocks for {length} tokens")
    return TraceRequest(float(fields["timestamp"]), length, int(fields["output_length"]), ids)


def _ask(request: TraceRequest, scale: float, speed: float, salt: int) -> Ask:
    wanted = max(1, round(request.input_length * scale))
    parts: list[str] = []
    length = 0
    for i, block in enumerate(request.hash_ids):
        # an id implies all before it, so its share of the rounding is always the same
        end = min(wanted, round((i + 1) * BLOCK * scale))
        if end > length:  # a short last block is a prefix of the whole one
            parts.append(words(random.Random(f"{salt}/{block}"), end - length))
            length = end
    output_len = max(1, round(request.output_length * scale))
    return Ask(" ".join(parts), length, output_len, request.timestamp_ms / 1000 / speed)
