"""Tail sampling: spans of a trace that is not sampled are held until the request's end decides.

The process that has a request's root decides: it keeps what failed, moved or was slow. It announces the trace ids that it
keeps, and the others export what they hold of these. All else expires.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from time import time_ns
from typing import Final, Protocol

from opentelemetry.trace import SpanKind, StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.trace_store import MOVED, REQUEST_ID, SLOW, TTFT

HELD_SPANS: Final = 20_000  # about 20 MB
HELD_NS: Final = 120 * 10**9  # since the first span of the trace ended
KEPT_NS: Final = 10 * 10**9  # a decision is remembered so long, for spans that end later
KEPT_IDS: Final = 10_000  # decisions
KEPT_PER_S: Final = 20.0  # by the tail, in bursts of ten seconds' worth: failures may be many
LATEST: Final = 1000  # requests, for the 99th percentile
ENOUGH: Final = 100  # of them


class Rate(Protocol):
    def take(self) -> bool: ...


class SlowRequests:
    """Whether a request was slow: by the time to its first token, or its whole time if it has none.

    Without `slow_s`, a request is slow if it is slower than 99 % of the latest 1,000.
    """

    def __init__(self, slow_s: float | None) -> None:
        self._slow_s = slow_s
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def take(self, seconds: float) -> bool:
        if self._slow_s is not None:
            return seconds >= self._slow_s
        latest, ordered = self._latest, self._sorted
        slow = len(ordered) >= ENOUGH and seconds > ordered[math.ceil(0.99 * len(ordered)) - 1]
        latest.append(seconds)
        insort(ordered, seconds)
        if len(latest) > LATEST:
            del ordered[bisect_left(ordered, latest.popleft())]
        return slow


class HeldTraces:
    """Takes ended spans: exports those of sampled traces, and holds the others."""

    def __init__(self, export: Callable[[LightSpan], None], slow: SlowRequests, rate: Rate | None = None) -> None:
        self._export = export
        self._slow = slow
        self._rate = rate  # None: no limit
        self._held: OrderedDict[int, list[LightSpan]] = OrderedDict()  # by trace id, the oldest first
        self._kept: OrderedDict[int, int] = OrderedDict()  # until when, wall-clock nanoseconds
        self._num_held = 0
        self._announce: Callable[[int], None] | None = None
        self.expired = 0  # spans that were never asked for
        self.not_kept = 0  # traces that the limit cost

    def announce_to(self, announce: Callable[[int], None] | None) -> None:
        """Call `announce` with the id of each trace that this process decides to keep."""
        self._announce = announce

    def take(self, span: LightSpan) -> None:
        is_root = span.kind is SpanKind.SERVER and REQUEST_ID in span.attributes
        wanted = self._judge(span) if is_root else False
        if span.flags:
            self._export(span)
        elif wanted and self._has_room():
            for each in (*self._taken(span), span):
                self._export(each)
            if self._announce is not None:
                self._announce(span.trace_id)
        elif is_root:
            self._taken(span)
        elif self._kept.get(span.trace_id, 0) > (span.end_time or 0):
            self._export(span)
        else:
            self._hold(span)

    def keep(self, trace_ids: Iterable[int]) -> None:
        """Export what is held of these traces, and what will end soon."""
        until_ns = time_ns() + KEPT_NS
        for trace_id in trace_ids:
            self._kept[trace_id] = until_ns
            for span in self._forget(trace_id):
                self._export(span)
        while len(self._kept) > KEPT_IDS:
            self._kept.popitem(last=False)

    def _judge(self, root: LightSpan) -> bool:
        """Mark a request that moved or was slow. Returns whether it must be kept."""
        failed = root.status.status_code is StatusCode.ERROR
        moved = any(event.name == "moved" for event in root.events)
        seconds = root.attributes.get(TTFT)
        whole_s = ((root.end_time or 0) - root.start_time) / 1e9
        slow = not failed and self._slow.take(seconds if isinstance(seconds, float) else whole_s)
        if moved:
            root.attributes[MOVED] = True
        if slow:
            root.attributes[SLOW] = True
        return failed or moved or slow

    def _has_room(self) -> bool:
        if self._rate is None or self._rate.take():
            return True
        self.not_kept += 1
        return False

    def _taken(self, root: LightSpan) -> list[LightSpan]:
        """Remove the held spans of one request, and return them. A client may put many requests into one trace."""
        held = self._forget(root.trace_id)
        others = [span for span in held if span.root_id != root.span_id]
        if others:
            self._held[root.trace_id] = others
            self._num_held += len(others)
        return [span for span in held if span.root_id == root.span_id]

    def _hold(self, span: LightSpan) -> None:
        if self._num_held >= HELD_SPANS or span.trace_id not in self._held:
            self._expire(span.end_time or 0)
        self._held.setdefault(span.trace_id, []).append(span)
        self._num_held += 1

    def _expire(self, now_ns: int) -> None:
        while self._held:
            trace_id, spans = next(iter(self._held.items()))
            if (spans[0].end_time or 0) > now_ns - HELD_NS and self._num_held < HELD_SPANS:
                return
            self.expired += len(self._forget(trace_id))

    def _forget(self, trace_id: int) -> list[LightSpan]:
        spans = self._held.pop(trace_id, [])
        self._num_held -= len(spans)
        return spans
