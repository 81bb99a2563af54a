"""Traces in Mooncake's format: one JSON object per line, equal hash ids for equal blocks.

`timestamp` is in ms; each of `hash_ids` stands for 512 tokens and all before them. Source: Qin et al., FAST 2025,
arXiv:2407.00079.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.load.workloads import PlannedRequest, words

BLOCK: Final = 512  # tokens


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int | None = None) -> Iterator[TraceRequest]:
    """Read a trace. Raises: ValueError, with the number of a wrong line; OSError."""
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


def trace_requests(path: Path, count: int | None, scale: float, speed: float, salt: int) -> list[PlannedRequest]:
    """Return requests of the trace in `path`.

    Args:
        count: number of requests; None: all.
        scale: factor of lengths and blocks, which keeps cached shares the same.
        speed: speed of arrivals; 2 is twice as fast.
        salt: seed of the blocks' words, in addition to their ids.
    Raises: ValueError, with the number of a wrong line; OSError.
    """
    return [_planned(request, scale, speed, salt) for request in read_trace(path, count)]


def _parse(line: str) -> TraceRequest:
    fields = json.loads(line)
    ids = [int(block) for block in fields["hash_ids"]]
    length = int(fields["input_length"])
    if len(ids) * BLOCK < length:
        raise ValueError(f"{len(ids)} blocks for {length} tokens")
    return TraceRequest(float(fields["timestamp"]), length, int(fields["output_length"]), ids)


def _planned(request: TraceRequest, scale: float, speed: float, salt: int) -> PlannedRequest:
    wanted = max(1, round(request.input_length * scale))
    parts: list[str] = []
    length = 0
    for i, block in enumerate(request.hash_ids):
        # an id implies all before it, so it is always rounded in the same way
        end = min(wanted, round((i + 1) * BLOCK * scale))
        if end > length:  # a short last block is a prefix of the whole one
            parts.append(words(random.Random(f"{salt}/{block}"), end - length))
            length = end
    output_len = max(1, round(request.output_length * scale))
    return PlannedRequest(" ".join(parts), length, output_len, request.timestamp_ms / 1000 / speed)
