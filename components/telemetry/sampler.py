"""Which requests are traced: every one while they are few, so many a second when they are many."""

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

BURST_S = 10.0  # an idle time of this length is made up for at once


class RateSampler(Sampler):
    """At most `per_s` new traces a second, over a while; a bucket that starts full.

    Spans cost a quarter of the mesh's processor time when every request of hundreds a second is traced, and nobody reads
    them all. Belongs under `ParentBased`: the process that a request enters first decides for all of its hops.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = self._most = max(1.0, per_s * BURST_S) if per_s else 0.0
        self._at = clock()

    def should_sample(  # noqa: PLR0917  # the signature is OpenTelemetry's
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Whether the trace that begins here is kept."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return SamplingResult(Decision.DROP)
        self._left -= 1
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        """For OpenTelemetry's own use."""
        return f"RateSampler({self._per_s:g}/s)"
