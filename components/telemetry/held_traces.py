"""Tail sampling: spans of a trace that is not sampled are held until its request ends.

The process with the root span keeps requests that failed, moved or were slow, and announces their trace ids. Other processes
export the spans that they hold of these. All other spans expire.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import time_ns
from typing import Final

from opentelemetry.trace import SpanKind, StatusCode

from components.telemetry.light_span import LightSpan
from components.telemetry.trace_pieces import MOVED, REQUEST_ID, SLOW
from components.token_bucket import TokenBucket

HELD_SPANS: Final = 20_000  # about 20 MB
HELD_NS: Final = 120 * 10**9  # since the trace's first span ended
KEPT_NS: Final = 10 * 10**9  # a decision is remembered, for spans that end later
KEPT_IDS: Final = 10_000  # remembered decisions
KEPT_PER_S: Final = 20.0  # limit of kept traces, as failures may be many; bursts: ten seconds' worth


class HeldTraces:
    """Exports the ended spans of sampled traces, and holds the others."""

    def __init__(self, export: Callable[[LightSpan], None], rate: TokenBucket | None = None) -> None:
        self._export = export
        self._rate = rate  # None: no limit
        self._held: OrderedDict[int, list[LightSpan]] = OrderedDict()  # by trace id, oldest first
        self._kept: OrderedDict[int, int] = OrderedDict()  # kept trace ids; expiry in wall-clock nanoseconds
        self._num_held = 0
        self._announce: Callable[[int], None] | None = None
        self.over_limit = 0  # spans dropped beyond `rate`

    def announce_to(self, announce: Callable[[int], None] | None) -> None:
        """`announce` gets the id of each trace that this process keeps."""
        self._announce = announce

    def take(self, span: LightSpan) -> None:
        if span.flags:
            self._export(span)
        elif span.kind is SpanKind.SERVER and REQUEST_ID in span.attributes:
            if _is_notable(span):
                self._keep_root(span)
        elif self._kept.get(span.trace_id, 0) > (span.end_time or 0):
            self._export(span)
        else:
            self._hold(span)

    def keep(self, trace_ids: Iterable[int]) -> None:
        """Export the held spans of these traces, and those that end within KEPT_NS."""
        until_ns = time_ns() + KEPT_NS
        for trace_id in trace_ids:
            self._kept[trace_id] = until_ns
            for span in self._forget(trace_id):
                self._export(span)
        while len(self._kept) > KEPT_IDS:
            self._kept.popitem(last=False)

    def _keep_root(self, root: LightSpan) -> None:
        if self._rate is not None and not self._rate.take():
            self.over_limit += 1 + len(root.steps)
            return
        self._export(root)
        if self._announce is not None:
            self._announce(root.trace_id)

    def _hold(self, span: LightSpan) -> None:
        if self._num_held >= HELD_SPANS or span.trace_id not in self._held:
            self._expire(span.end_time or 0)
        self._held.setdefault(span.trace_id, []).append(span)
        self._num_held += 1 + len(span.steps)

    def _expire(self, now_ns: int) -> None:
        while self._held:
            trace_id, spans = next(iter(self._held.items()))
            if (spans[0].end_time or 0) > now_ns - HELD_NS and self._num_held < HELD_SPANS:
                return
            self._forget(trace_id)

    def _forget(self, trace_id: int) -> list[LightSpan]:
        spans = self._held.pop(trace_id, [])
        self._num_held -= sum(1 + len(span.steps) for span in spans)
        return spans


def _is_notable(root: LightSpan) -> bool:
    return root.status.status_code is StatusCode.ERROR or MOVED in root.attributes or SLOW in root.attributes
