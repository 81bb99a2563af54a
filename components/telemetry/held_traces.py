"""Tail sampling: spans of a trace that is not sampled are held until the request's end decides.

The process that has a request's root decides: it keeps what failed, moved or was slow. It announces the trace ids that it
keeps, and the others export what they hold of these. All else expires.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from opentelemetry.trace import SpanKind, StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.trace_store import MOVED, REQUEST_ID, SLOW, TTFT

HELD_SPANS: Final = 20_000  # about 20 MB
HELD_NS: Final = 120 * 10**9  # since the first span of the trace ended
KEPT_IDS: Final = 10_000  # decisions that are remembered, for spans that end later
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
        self._kept: OrderedDict[int, None] = OrderedDict()
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
        if span.flags or span.trace_id in self._kept:
            self._export(span)
        elif not is_root:
            self._hold(span)
        elif wanted:
            self._keep_own(span)
        else:
            self._forget(span.trace_id)

    def keep(self, trace_ids: Iterable[int]) -> None:
        """Export what is held of these traces, and what will end later."""
        for trace_id in trace_ids:
            self._kept[trace_id] = None
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

    def _keep_own(self, root: LightSpan) -> None:
        if self._rate is not None and not self._rate.take():
            self.not_kept += 1
            self._forget(root.trace_id)
            return
        self.keep([root.trace_id])
        self._export(root)
        if self._announce is not None:
            self._announce(root.trace_id)

    def _hold(self, span: LightSpan) -> None:
        spans = self._held.get(span.trace_id)
        if spans is None:
            spans = self._held[span.trace_id] = []
            self._expire(span.end_time or 0)
        spans.append(span)
        self._num_held += 1

    def _expire(self, now_ns: int) -> None:
        while self._held:
            spans = next(iter(self._held.values()))
            in_time = not spans or (spans[0].end_time or 0) > now_ns - HELD_NS
            if in_time and self._num_held < HELD_SPANS:
                return
            self.expired += len(self._forget(next(iter(self._held))))

    def _forget(self, trace_id: int) -> list[LightSpan]:
        spans = self._held.pop(trace_id, [])
        self._num_held -= len(spans)
        return spans
