"""What one request was, and where its time went: its spans, its log line and whether it was slow are read from here."""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from time import time_ns
from types import TracebackType
from typing import Final, Self

from opentelemetry.trace import Span, SpanKind, get_current_span

from components.errors import MeshError
from components.openai.errors import ApiError
from components.telemetry.light_span import LightSpan, Step
from components.telemetry.logs import request_id
from components.telemetry.spans import NOT_KEPT, CurrentSpan, EndingSpan
from components.telemetry.trace_pieces import MOVED, REQUEST_ID, SLOW, TENANT, TTFT
from components.wire.generate import PromptOrigin
from services.frontend.config import SlowLimits

DISPATCH: Final = "frontend.dispatch"
FAIL: Final = "frontend.fail"
REPEATED_PHASES: Final = {"route", "dispatch"}  # phases that a stream repeats when it moves
SAFE_PARAM: Final = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")  # in a log line: a client chooses the name of an unknown one
PHASES_AFTER_FIRST_TOKEN: Final = {"first_token", "stream", "receive"}  # phases that are not before the first token


class RequestTimeline:
    """Its phases are steps of `root`, also if no trace is kept. Times are wall-clock nanoseconds.

    Within its `with` block, and in tasks begun there, `request_timeline` returns this timeline, and log lines have the
    request's id.
    """

    __slots__ = (
        "_current", "_in_trace", "_phase", "_phase_ns", "_request_id", "_span", "code", "decodes", "end_ns", "error",
        "first_ns", "longest_gap_s", "moves", "origins", "param", "reason", "root", "ttft_s",
    )  # fmt: skip

    def __init__(self, span: Span, root: LightSpan, phase: str = "") -> None:
        """`span`: the current one inside. It is `root` if the trace is kept."""
        self.root = root
        self.end_ns = 0
        self.first_ns = 0  # when the first token arrived; 0: not yet
        self.ttft_s: float | None = None  # until it was sent
        self.longest_gap_s = 0.0  # between two pieces of a stream
        self.error = ""  # name of the class
        self.reason = ""  # of a server's error; a client's own may quote the request
        self.code = self.param = ""  # of a client's error
        self._span = span
        self._phase, self._phase_ns = phase, root.start_time
        self.decodes: list[str] = []  # instances that accepted it, in order
        self.moves: list[str] = []  # causes
        self.origins: list[PromptOrigin] = []  # of its prompts

    @property
    def is_kept(self) -> bool:
        return self._span is self.root

    def __enter__(self) -> Self:
        self._current = _current.set(self)
        self._request_id = request_id.set(self.root.attributes.get(REQUEST_ID, ""))
        self._in_trace = CurrentSpan(self._span)
        self._in_trace.__enter__()
        if self.is_kept:
            _running[self.root.trace_id] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _running.pop(self.root.trace_id, None)
        self._in_trace.__exit__(None, None, None)
        request_id.reset(self._request_id)
        _current.reset(self._current)
        self.root.end(self.end_ns or None)

    def seconds(self) -> float:
        """Since it began."""
        return max(0.0, (time_ns() - self.root.start_time) / 1e9)

    def begin(self, phase: str, start_ns: int = 0) -> None:
        """Begin a phase where the one before ends, so that no time is left out between two."""
        now_ns = start_ns or time_ns()
        self.pause(now_ns)
        self._phase, self._phase_ns = phase, now_ns

    def pause(self, now_ns: int = 0) -> Step | None:
        """End the phase; what follows is measured by steps."""
        if not self._phase:
            return None
        step = Step(self.root, self._phase, self._phase_ns)
        step.end(now_ns)
        self._phase = ""
        return step

    def step(self, name: str) -> Step:
        return Step(self.root, name, time_ns())

    def dispatching(self) -> AbstractContextManager[Span | Step]:
        """Around a call to decode, whose spans hang below it."""
        if self.is_kept:
            return EndingSpan(self.root.child(DISPATCH, SpanKind.CLIENT))
        return Step(self.root, DISPATCH, time_ns(), SpanKind.CLIENT)

    def first_token_sent(self) -> float:
        """Returns the time to first token."""
        self.begin("frontend.stream")
        self.ttft_s = max(0.0, (self._phase_ns - self.root.start_time) / 1e9)
        self.root.attributes[TTFT] = round(self.ttft_s, 6)
        return self.ttft_s

    def failed(self, exc: Exception, error: ApiError) -> None:
        """`error`: what the client gets for `exc`."""
        self.error = type(exc).__name__
        if error.status >= 500:
            self.reason = exc.message if isinstance(exc, MeshError) else ""
        else:
            self.code = error.code or ""
            self.param = error.param if error.param and SAFE_PARAM.fullmatch(error.param) else ""
        if (step := self.pause()) is not None:
            step.error = f"{self.error}: {exc}"
        self.begin(FAIL)

    def sent_to(self, decode: str) -> None:
        self.decodes.append(decode)

    def moved(self, cause: str) -> None:
        self.moves.append(cause)

    def prompt_computed(self, origin: PromptOrigin) -> None:
        self.origins.append(origin)

    def close(self, limits: SlowLimits, num_tokens: int) -> dict[str, str]:
        """End the last phase, and mark the trace. Returns why the request was slow, by limit."""
        end_ns = self.end_ns = time_ns()
        self.pause(end_ns)
        late = self._late(limits, end_ns, num_tokens)
        if late:
            self.root.attributes[SLOW] = True
        if self.moves:
            self.root.attributes[MOVED] = True
        return late

    def _late(self, limits: SlowLimits, end_ns: int, num_tokens: int) -> dict[str, str]:
        total_s, late = (end_ns - self.root.start_time) / 1e9, {}
        ttft_s = total_s if self.ttft_s is None else self.ttft_s
        if ttft_s >= limits.ttft_s:
            before = {name: s for name, s in self.spent_s(end_ns).items() if name not in PHASES_AFTER_FIRST_TOKEN}
            phase, seconds = max(before.items(), key=lambda one: one[1], default=("unknown", ttft_s))
            late["ttft"] = f"{phase} took {seconds:.1f} s of the {ttft_s:.1f} s to the first token"
        if self.ttft_s is None:
            return late
        tpot_s = (total_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        if tpot_s >= limits.tpot_s:
            late["tpot"] = f"{tpot_s:.2f} s per output token"
        if self.longest_gap_s >= limits.stall_s:
            late["stall"] = f"no token for {self.longest_gap_s:.1f} s"
        return late

    def spent_s(self, end_ns: int) -> dict[str, float]:
        """Return seconds by phase.

        Overlapping steps of one name count once. The time between two steps counts for the later one. `prefill` lasts
        from the end of the last dispatch to the first token or the failure. What a stream does to move is part of `stream`.
        """
        spent: dict[str, int] = defaultdict(int)
        reached: dict[str, int] = defaultdict(int)
        first_ns = self.first_ns or next((step.start_time for step in self.root.steps if step.name == FAIL), end_ns)
        counted_ns = self.root.start_time  # the time until then is in a phase
        for step in sorted(self.root.steps, key=lambda step: step.start_time):
            name, step_ns = step.name.removeprefix("frontend."), step.end_time or end_ns
            moves = step.start_time >= first_ns and name in REPEATED_PHASES
            if moves or name == step.name:  # or it is the span of a lost process, below the dispatch
                continue
            if step.start_time >= first_ns and "prefill" in spent:
                counted_ns = max(counted_ns, first_ns)
            spent[name] += max(0, step_ns - max(min(step.start_time, counted_ns), reached[name]))
            reached[name] = max(reached[name], step_ns)
            counted_ns = max(counted_ns, step_ns)
            looks_again = name in REPEATED_PHASES and "prefill" in spent  # for another decode
            if (step.name == DISPATCH or looks_again) and step_ns <= first_ns:
                spent["prefill"] = first_ns - step_ns
        spent.pop("receive", None)  # the last part of that wait
        return {name: ns / 1e9 for name, ns in spent.items()}


_current: Final[ContextVar[RequestTimeline | None]] = ContextVar("request_timeline", default=None)
_running: Final[dict[int, RequestTimeline]] = {}  # by trace id; if two requests share a trace, the later one


def decode_of(trace_id: str, tenant: str | None) -> str:
    """The decode instance that now serves a request of this process; empty if none does. `tenant`: only one of its own."""
    try:
        timeline = _running.get(int(trace_id, 16))
    except ValueError:
        return ""
    if timeline is None or (tenant is not None and timeline.root.attributes.get(TENANT) != tenant):
        return ""
    return timeline.decodes[-1] if timeline.decodes else ""


def request_timeline() -> RequestTimeline:
    """Return the current request's timeline; without one, a timeline that is never read."""
    found = _current.get()
    if found is not None:
        return found
    span = get_current_span()
    return RequestTimeline(span, span) if isinstance(span, LightSpan) else unkept_timeline(NOT_KEPT, "")


def unkept_timeline(span: Span, name: str, facts: Mapping[str, str] | None = None, phase: str = "") -> RequestTimeline:
    """Return a timeline whose trace is not kept here. `span`: the caller's, whose trace may be kept elsewhere."""
    return RequestTimeline(span, LightSpan(name, 0, 0, 0, _nowhere, SpanKind.SERVER, facts), phase)


def _nowhere(_: LightSpan) -> None:
    pass
