"""Recent observations as differences of counters."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from components.planning.samples import PLANNED, Histogram, Observation, Planned, WorkerSample


@dataclass(slots=True)
class Work:
    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    accepted: int = 0
    queued_growth: int = 0  # prompt tokens
    waiting_s: float = 0.0  # waiting requests times seconds

    def add(self, other: "Work") -> None:
        self.busy_s += other.busy_s
        self.steps += other.steps
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens
        self.accepted += other.accepted
        self.queued_growth += other.queued_growth
        self.waiting_s += other.waiting_s


@dataclass(slots=True)
class Span:
    seconds: float = 0.0
    work: dict[Planned, Work] = field(default_factory=lambda: {role: Work() for role in PLANNED})
    each: dict[Planned, list[Work]] = field(default_factory=lambda: {role: [] for role in PLANNED})  # by worker
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)


class History:
    """The last `window_s` seconds, without a gap between observations."""

    def __init__(self, window_s: float, longest_gap_s: float) -> None:
        self._window_s = window_s
        self._longest_gap_s = longest_gap_s
        self._last: Observation | None = None
        self._spans: deque[tuple[float, Span]] = deque()  # by end time

    def see(self, now: Observation) -> Span | None:
        """The span since the last observation, if there was no gap."""
        last, self._last = self._last, now
        if last is None or not 0 < now.at_s - last.at_s <= self._longest_gap_s:
            self._spans.clear()
            return None
        span = _between(last, now)
        self._spans.append((now.at_s, span))
        while self._spans and self._spans[0][0] <= now.at_s - self._window_s:
            self._spans.popleft()
        return span

    @property
    def seconds(self) -> float:
        return sum(span.seconds for _, span in self._spans)

    def total(self) -> Span:
        """The window as one span, without `each`."""
        total = Span()
        for _, span in self._spans:
            total.seconds += span.seconds
            total.ttft = total.ttft.plus(span.ttft)
            total.itl = total.itl.plus(span.itl)
            for role in PLANNED:
                total.work[role].add(span.work[role])
        return total


def _between(before: Observation, now: Observation) -> Span:
    span = Span(now.at_s - before.at_s)
    for role in PLANNED:
        was: Mapping[str, WorkerSample] = {w.instance_id: w for w in before.workers.get(role, ())}
        workers: Sequence[WorkerSample] = now.workers.get(role, ())
        for worker in workers:
            if (old := was.get(worker.instance_id)) is not None:
                done = _done(old, worker, span.seconds)
                span.each[role].append(done)
                span.work[role].add(done)
    frontends = {frontend.instance_id: frontend for frontend in before.frontends}
    for frontend in now.frontends:
        if (then := frontends.get(frontend.instance_id)) is not None:
            span.ttft = span.ttft.plus(frontend.ttft.since(then.ttft))
            span.itl = span.itl.plus(frontend.itl.since(then.itl))
    return span


def _done(before: WorkerSample, now: WorkerSample, seconds: float) -> Work:
    return Work(
        busy_s=max(0.0, now.busy_s - before.busy_s),
        steps=max(0, now.steps - before.steps),
        prompt_tokens=max(0, now.prompt_tokens - before.prompt_tokens),
        generated_tokens=max(0, now.generated_tokens - before.generated_tokens),
        accepted=max(0, now.accepted - before.accepted),
        queued_growth=now.queued_tokens - before.queued_tokens,
        waiting_s=now.waiting * seconds,
    )
