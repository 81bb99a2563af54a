"""One log line per request, at its end: what it was, where its time went, and why it was slow. No content.

The log handler does not merge these lines, as it merges repeated ones. So `RequestLines` limits the rate of those of
ordinary requests.
"""

import logging
from collections.abc import Mapping
from math import inf
from typing import Final

from prometheus_client import Counter

from components.telemetry.repeated_lines import requests as log
from components.token_bucket import TokenBucket
from services.frontend.config import SlowLimits
from services.frontend.request_timeline import RequestTimeline

DEFAULT_LIMITS: Final = SlowLimits()


class RequestLines:
    """Ends timelines. Lines of ordinary requests beyond `per_s` are counted, and the next line says how many."""

    def __init__(self, per_s: float = inf, limits: SlowLimits = DEFAULT_LIMITS, slow: Counter | None = None) -> None:
        """`slow`: counts slow requests by reason."""
        self._rate = TokenBucket(per_s)
        self._limits = limits
        self._slow = slow
        self._left_out = 0

    def refused(self, route: str, status: int, error: str, *, request_id: str, label: str, api_key: str) -> None:
        """Log a request that the gate refused. `error`: the message that the client gets."""
        if self._passes(logging.INFO, is_ordinary=True):
            texts = {"error": error, "api_key": api_key, "client_request_id": label}
            facts = {"route": route, "status": status, "request_id": request_id}
            self._write(logging.INFO, facts | {name: text for name, text in texts.items() if text})

    def end(
        self,
        timeline: RequestTimeline,
        route: str,
        model: str,
        status: int,
        *,
        label: str = "",
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """`label`: the client's own name of the request. Slow, failed and moved requests always have a line."""
        late = timeline.close(self._limits, output_tokens)
        if late and self._slow is not None:
            for reason in late:
                self._slow.labels(reason).inc()
        moves = timeline.moves
        level = logging.WARNING if late or status >= 500 else logging.INFO
        if not self._passes(level, is_ordinary=level == logging.INFO and not moves):
            return
        facts: dict[str, object] = {"route": route} | ({"model": model} if model else {}) | {"status": status}
        counts = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}
        facts |= {name: count for name, count in counts.items() if count}
        facts["total_s"] = round((timeline.end_ns - timeline.root.start_time) / 1e9, 4)
        if timeline.ttft_s is not None:
            facts["ttft_s"] = round(timeline.ttft_s, 4)
        facts |= {f"{name}_s": round(seconds, 4) for name, seconds in timeline.spent_s(timeline.end_ns).items()}
        local = "; ".join(dict.fromkeys(origin.why_local for origin in timeline.origins if origin.why_local))
        if moves:
            facts |= {"moves": len(moves), "moved_because": moves[-1]}
        texts = {
            "decode": ",".join(dict.fromkeys(timeline.decodes)),
            "prefill": ",".join(dict.fromkeys(origin.prefill for origin in timeline.origins if origin.prefill)),
            "local_prefill": local,
            "error": timeline.error,
            "code": timeline.code,
            "param": timeline.param,
            "reason": timeline.reason,
            "slow": _why_slow(late, len(moves), local),
            "client_request_id": label,
        }
        self._write(level, facts | {name: text for name, text in texts.items() if text})

    def _passes(self, level: int, *, is_ordinary: bool) -> bool:
        if not log.isEnabledFor(level):
            return False
        passes = not is_ordinary or self._rate.take()
        self._left_out += not passes
        return passes

    def _write(self, level: int, facts: dict[str, object]) -> None:
        if self._left_out:
            facts["left_out"], self._left_out = self._left_out, 0
        log.log(level, "request", extra=facts)


def _why_slow(late: Mapping[str, str], num_moves: int, local_prefill: str) -> str:
    """Return which limits a slow request has reached, and what delayed it; "" if it is not slow."""
    why = [*late.values()]
    if late and num_moves:
        why.append("moved once" if num_moves == 1 else f"moved {num_moves} times")
    if late and local_prefill:
        why.append("its prompt was computed on decode")
    return "; ".join(why)
