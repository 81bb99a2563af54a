"""Requests of a trace in the format that Mooncake publishes: one JSON object a line, equal hash ids for equal blocks.

`timestamp` is in ms, `input_length` and `output_length` in tokens, and `hash_ids` has one id for each 512 tokens of the
prompt, which stands for these tokens and all before them. Source: Qin et al., FAST 2025, arXiv:2407.00079.
"""

import json
import random
from pathlib import Path
from typing import Any, Final

from bench.load.workloads import Ask, words

BLOCK: Final = 512  # tokens


def trace_asks(path: Path, count: int | None, scale: float, speed: float, salt: int) -> list[Ask]:
    """The first `count` requests of the trace in `path`.

    Args:
        path: the trace.
        count: None takes all.
        scale: of the lengths; blocks shrink with them, so that the same share of each prompt has been seen before.
        speed: of the arrivals; 2 lets them come twice as fast.
        salt: makes the words of a block, together with its id.
    Raises: ValueError, naming the line that is not of such a trace; OSError.
    """
    asks: list[Ask] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if count is not None and len(asks) >= count:
                break
            if not line.strip():
                continue
            try:
                asks.append(_ask(json.loads(line), scale, speed, salt))
            except (ValueError, LookupError, TypeError, AttributeError) as exc:
                raise ValueError(f"{path}:{number} is not a request of a trace: {type(exc).__name__}: {exc}") from exc
    if not asks:
        raise ValueError(f"{path} has no requests")
    return asks


def _ask(request: dict[str, Any], scale: float, speed: float, salt: int) -> Ask:
    wanted = max(1, round(request["input_length"] * scale))
    parts: list[str] = []
    length = 0
    for i, block in enumerate(request["hash_ids"]):
        # An id implies all before it, so it stands at one place only, and its share of the rounding is always the same.
        end = min(wanted, round((i + 1) * BLOCK * scale))
        if end > length:  # a short last block is the beginning of the whole one
            parts.append(words(random.Random(f"{salt}/{block}"), end - length))
            length = end
    if length < wanted:
        raise ValueError(f"{len(request['hash_ids'])} blocks for {request['input_length']} tokens")
    output_len = max(1, round(request["output_length"] * scale))
    return Ask(" ".join(parts), length, output_len, request["timestamp"] / 1000 / speed)
