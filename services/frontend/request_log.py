"""One log line per request, at its end: what it was, where its time went, and why it was slow. No content.

The logger's lines are not counted together as others are. `LineLimit` bounds those of ordinary requests.
"""

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Final

from components.errors import MeshError
from components.telemetry.repeated_lines import requests as log
from components.telemetry.request_ids import of_request
from components.telemetry.spans import TraceRate
from components.wire.generate import PromptOrigin

SLOW_TTFT_S: Final = 2.0
SLOW_TPOT_S: Final = 0.25  # per output token after the first


class LineLimit:
    """Lines of ordinary requests: further ones are counted, and the next line says how many were left out."""

    def __init__(self, per_s: float = inf) -> None:
        self._rate = TraceRate(per_s)
        self._left_out = 0

    def passes(self) -> bool:
        passes = self._rate.take()
        self._left_out += not passes
        return passes

    def take_left_out(self) -> int:
        left_out, self._left_out = self._left_out, 0
        return left_out


class RequestLog:
    """Facts of one request, noted while it runs. Times are of perf_counter()."""

    __slots__ = ("_decodes", "_moves", "_origins", "_phases", "began_s", "error", "first_token_s", "reason")

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.first_token_s = 0.0  # when it arrived; 0: not yet
        self.error = ""  # name of the class
        self.reason = ""  # of an error of ours; a client's own may quote the request
        self._phases: list[tuple[str, float]] = [("read", self.began_s)]
        self._decodes: list[str] = []
        self._moves: list[str] = []  # causes
        self._origins: list[PromptOrigin] = []

    @contextmanager
    def current(self, request_id: str) -> Generator[None, None, None]:
        """Inside, and in tasks begun there, `request_log` returns this one, and log lines have the request's id."""
        token = _current.set(self)
        try:
            with of_request(request_id):
                yield
        finally:
            _current.reset(token)

    def begin(self, phase: str) -> None:
        self._phases.append((phase, time.perf_counter()))

    def sent_to(self, decode: str) -> None:
        self._decodes.append(decode)

    def moved(self, cause: str) -> None:
        self._moves.append(cause)

    def prompt_computed(self, origin: PromptOrigin) -> None:
        self._origins.append(origin)

    def failed(self, exc: Exception, status: int) -> None:
        self.error = type(exc).__name__
        self.reason = exc.message if isinstance(exc, MeshError) and status >= 500 else ""

    def write(
        self,
        route: str,
        model: str,
        status: int,
        *,
        label: str = "",
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        limit: LineLimit,
    ) -> None:
        """`label`: the client's own name of the request. Slow, failed and moved requests pass any `limit`."""
        ended_s = time.perf_counter()
        spent_s, total_s = self._spent_s(ended_s), ended_s - self.began_s
        slow = self._why_slow(spent_s, ended_s, output_tokens)
        level = logging.WARNING if slow or status >= 500 else logging.INFO
        is_ordinary = level == logging.INFO and not self._moves
        if not log.isEnabledFor(level) or (is_ordinary and not limit.passes()):
            return
        facts: dict[str, object] = {"route": route, "model": model, "status": status}
        facts |= {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}
        facts["total_s"] = round(total_s, 4)
        if self.first_token_s:
            facts["ttft_s"] = round(self.first_token_s - self.began_s, 4)
        facts |= {f"{name}_s": round(seconds, 4) for name, seconds in spent_s.items()}
        if self._decodes:
            facts["decode"] = ",".join(dict.fromkeys(self._decodes))
        facts |= self._prefill_facts()
        if self._moves:
            facts |= {"moves": len(self._moves), "moved_because": self._moves[-1]}
        texts = {"error": self.error, "reason": self.reason, "slow": slow, "client_request_id": label}
        facts |= {name: text for name, text in texts.items() if text}
        if left_out := limit.take_left_out():
            facts["left_out"] = left_out
        log.log(level, "request", extra=facts)

    def _spent_s(self, ended_s: float) -> dict[str, float]:
        marks = list(self._phases)
        if self.first_token_s:
            marks.append(("generate", self.first_token_s))
        ends = [at_s for _, at_s in marks[1:]] + [ended_s]
        return {name: max(0.0, end_s - at_s) for (name, at_s), end_s in zip(marks, ends, strict=True)}

    def _prefill_facts(self) -> Mapping[str, object]:
        prefills = ",".join(dict.fromkeys(origin.prefill for origin in self._origins if origin.prefill))
        local = "; ".join(dict.fromkeys(origin.why_local for origin in self._origins if origin.why_local))
        return {name: text for name, text in (("prefill", prefills), ("local_prefill", local)) if text}

    def _why_slow(self, spent_s: Mapping[str, float], ended_s: float, output: int) -> str:
        """Empty if neither the first token nor the following ones were late."""
        ttft_s = (self.first_token_s or ended_s) - self.began_s
        tpot_s = (ended_s - self.first_token_s) / (output - 1) if self.first_token_s and output > 1 else 0.0
        late = []
        if ttft_s > SLOW_TTFT_S:
            phase, seconds = max(((n, s) for n, s in spent_s.items() if n != "generate"), key=lambda one: one[1])
            late.append(f"{seconds:.1f} s of {ttft_s:.1f} s until the first token were {phase}")
        if tpot_s > SLOW_TPOT_S:
            late.append(f"{tpot_s:.2f} s per output token")
        if late and self._moves:
            late.append(f"moved {len(self._moves)} times")
        if late and any(origin.why_local for origin in self._origins):
            late.append("its prompt was computed on decode")
        return "; ".join(late)


_current: Final[ContextVar[RequestLog | None]] = ContextVar("request_log", default=None)


def request_log() -> RequestLog:
    """That of the current request; one that is never written if there is none."""
    return _current.get() or RequestLog()
