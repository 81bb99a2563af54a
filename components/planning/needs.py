"""How many workers each role needs, and why, from observations."""

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Final

from components.planning.demand import (
    StepCurve,
    crowded,
    decode_workers,
    prefill_workers,
    waits,
)
from components.planning.history import Span, Work
from components.planning.samples import Observation, Planned

LEARNING_S: Final = 300.0  # for variability and delays
VARIABILITY: Final = (0.3, 5.0)  # allowed range
TREND_S: Final = 120.0
ENOUGH: Final = 20  # requests for a share or mean
CEILING: Final = 0.95  # of the load at which a target was missed
PURE: Final = 0.1  # prompt tokens per generated token: up to this a step shows decode's cost


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float = 0.5
    itl_s: float = 0.05
    goal: float = 0.9  # share of first tokens and of gaps within their limits
    kv_usage: float = 0.8  # share of decode's pages in use
    backlog_s: float = 30.0  # time to clear a queue
    headroom: float = 0.15  # extra load that the remaining workers must carry before one is removed
    memory_s: float = 1800.0  # how long a missed target is remembered


@dataclass(frozen=True, slots=True)
class Need:
    now: int  # workers needed
    shrunk: int  # with headroom, below which none is removed
    why: str  # what needs most workers


class Trend:
    """Predicts the rise of a load. Falls are not predicted."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # (time, load)

    def rise(self, now_s: float, load: float, ahead_s: float) -> float:
        self._seen.append((now_s, load))
        while self._seen[0][0] < now_s - TREND_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        if now_s - then_s < TREND_S / 2:
            return 0.0
        return max(0.0, (load - before) / (now_s - then_s) * ahead_s)

    def forget(self) -> None:
        self._seen.clear()


@dataclass(slots=True)
class _Ceiling:
    load: float  # limit per worker
    at_s: float


class Needs:
    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.curve = StepCurve()
        self.tokens_per_s = 0.0  # speed of a busy prefill worker; 0: unknown
        self.service_s = 0.0  # mean computing time of a prompt
        self.variability = 1.0
        self.other_s = 0.0  # of TTFT, neither waiting nor computing
        self.offered = 0.0  # prompt work in workers
        self.answer_tokens = 0.0  # generated tokens per request
        self._trends: dict[Planned, Trend] = {"prefill": Trend(), "decode": Trend()}
        self._ceilings: dict[Planned, _Ceiling] = {}

    def saw(self, span: Span) -> None:
        for work in span.each["decode"]:
            if work.steps >= 5 and work.prompt_tokens <= PURE * work.generated_tokens:
                self.curve.saw(work.generated_tokens / work.steps, work.busy_s / work.steps)

    def forget(self) -> None:
        for trend in self._trends.values():
            trend.forget()

    def needs(self, now: Observation, total: Span, *, steady_s: float, ahead_s: float) -> dict[Planned, Need]:
        """`total`: the window before `now`.

        Args:
            steady_s: time since the number of workers changed, or one was missing.
            ahead_s: time from the middle of the window until a new worker would serve.
        """
        self._learn(now, total, steady=steady_s >= total.seconds)
        if steady_s >= 2 * total.seconds:  # work from before the last change has ended
            self._notice_misses(now, total)
        return {"prefill": self._prefill(now, ahead_s), "decode": self._decode(now, total, ahead_s)}

    # Prefill.

    def _learn(self, now: Observation, total: Span, *, steady: bool) -> None:
        work, workers = total.work["prefill"], now.serving("prefill")
        if work.busy_s > 0 and work.prompt_tokens:
            self.tokens_per_s = work.prompt_tokens / work.busy_s
        self.offered = self._offered(total)
        if not work.accepted or not self.tokens_per_s:
            return
        self.service_s = self.offered * total.seconds / work.accepted
        if work.accepted < ENOUGH or not steady:
            return
        weight = min(1.0, total.seconds / LEARNING_S) / 10  # each observation is in about ten windows
        waiting = work.waiting_s / total.seconds
        if 0.3 * workers < self.offered < 0.95 * workers:
            random = waits(workers, self.offered) * self.offered / (workers - self.offered)
            if random > 0.05:
                least, most = VARIABILITY
                seen = min(most, max(least, waiting / random))
                self.variability *= exp(weight * (log(seen) - log(self.variability)))
        if total.ttft.count >= ENOUGH:
            waited_s = waiting * total.seconds / work.accepted
            other_s = min(self._targets.ttft_s / 2, max(0.0, total.ttft.mean_s - self.service_s - waited_s))
            self.other_s += weight * (other_s - self.other_s)

    def _offered(self, total: Span) -> float:
        """Computed prompts, growth of the queues, and local prefill, in workers."""
        work = total.work["prefill"]
        if not self.tokens_per_s:
            return 0.0
        more = work.queued_growth + total.work["decode"].prompt_tokens
        return max(0.0, work.busy_s + more / self.tokens_per_s) / total.seconds

    def _patience_s(self) -> float:
        """Return the part of the TTFT target that is left for waiting."""
        return max(self._targets.ttft_s - self.service_s - self.other_s, self.service_s / 2)

    def _prefill(self, now: Observation, ahead_s: float) -> Need:
        targets = self._targets
        rise = self._trends["prefill"].rise(now.at_s, self.offered, ahead_s)
        queued = sum(worker.queued_tokens for worker in now.workers["prefill"])
        if not self.tokens_per_s or not (self.offered or queued):
            return Need(1, 1, "no prompts")
        queued_s = queued / self.tokens_per_s
        patience_s = self._patience_s()

        def workers(offered: float) -> int:
            fewest = prefill_workers(
                offered + queued_s / targets.backlog_s,
                patience_s,
                self.service_s,
                late_share=1 - targets.goal,
                variability=self.variability,
            )
            return max(fewest, self._under_ceiling("prefill", offered, now.at_s))

        why = (
            f"prompts keep {self.offered:.2f} workers busy, soon {rise:.2f} more, {queued_s:.1f} s of work wait; "
            f"a prompt takes {self.service_s * 1000:.0f} ms and may wait {patience_s * 1000:.0f} ms"
        )
        soon = self.offered + rise
        return Need(workers(soon), workers(soon * (1 + targets.headroom)), why)

    # Decode.

    def _decode(self, now: Observation, total: Span, ahead_s: float) -> Need:
        work, seconds = total.work["decode"], total.seconds
        here = max(1, now.serving("decode"))
        load = self._tokens_offered(work, seconds)
        load += self._trends["decode"].rise(now.at_s, load, ahead_s)
        reasons = [self._for_gaps(work, load, here), self._for_pages(now)]
        if work.waiting_s / seconds > here / 2:
            reasons.append(
                Need(here + 1, here + 1, f"{work.waiting_s / seconds:.1f} requests wait for pages or places")
            )
        if self._itl_can_be_kept():
            ceiling = self._under_ceiling("decode", load, now.at_s)
            shrunk = self._under_ceiling("decode", load * (1 + self._targets.headroom), now.at_s)
            reasons.append(Need(ceiling, shrunk, f"with {load:.0f} tokens/s on fewer the target was missed"))
        tightest = max(reasons, key=lambda need: (need.now, need.shrunk))
        return Need(tightest.now, max(need.shrunk for need in reasons), tightest.why)

    def _tokens_offered(self, work: Work, seconds: float) -> float:
        """Requested tokens per second; while requests wait, fewer are generated."""
        made = work.generated_tokens / seconds
        if work.waiting_s / seconds < 1 and work.accepted >= ENOUGH:
            each = work.generated_tokens / work.accepted
            weight = 0.1 if self.answer_tokens else 1.0
            self.answer_tokens += weight * (each - self.answer_tokens)
            return made
        return max(made, work.accepted / seconds * self.answer_tokens)

    def _for_gaps(self, work: Work, load: float, here: int) -> Need:
        targets = self._targets
        if not work.steps or not work.generated_tokens:
            return Need(1, 1, "no tokens")
        batch, step_s = work.generated_tokens / work.steps, work.busy_s / work.steps
        why = f"{load:.0f} tokens/s in steps of {step_s * 1000:.1f} ms with {batch:.1f} requests"
        line = self.curve.line()
        if line is None:  # with one known batch size, time is assumed to be proportional to it
            share = step_s * max(1.0, crowded(batch, targets.goal) / batch) / targets.itl_s
            return Need(min(here + 1, ceil(here * share)), max(1, ceil(here * share * (1 + targets.headroom))), why)
        now = decode_workers(load, line, targets.itl_s, targets.goal)
        shrunk = decode_workers(load * (1 + targets.headroom), line, targets.itl_s, targets.goal)
        if now is None or shrunk is None:  # more workers do not help: pages and waits decide
            one_ms = (line.fixed_s + line.each_s) * 1000
            return Need(1, 1, f"a step of one request takes {one_ms:.1f} ms, more than the target")
        return Need(now, shrunk, why)

    def _itl_can_be_kept(self) -> bool:
        line = self.curve.line()
        return line is None or line.fixed_s + line.each_s <= self._targets.itl_s

    def _for_pages(self, now: Observation) -> Need:
        workers = now.workers["decode"]
        used, pages = sum(w.used_pages for w in workers), sum(w.total_pages for w in workers)
        if not pages:
            return Need(1, 1, "no pages")
        each = self._targets.kv_usage * pages / len(workers)
        fewest, shrunk = ceil(used / each), ceil(used * (1 + self._targets.headroom) / each)
        return Need(max(1, fewest), max(1, shrunk), f"{used} of {pages} pages are held")

    # Corrections by measured misses.

    def _notice_misses(self, now: Observation, total: Span) -> None:
        """Lower the load per worker if a target was missed, because workers then carry less than the formulas say."""
        targets = self._targets
        decodes, prefills = now.serving("decode"), now.serving("prefill")
        work = total.work["prefill"]
        missed = total.ttft.count >= ENOUGH and total.ttft.share_within(targets.ttft_s) < targets.goal
        # more workers only help if prompts wait
        if missed and self._late_by_waiting(work, prefills) > (1 - targets.goal) / 2:
            self._lower("prefill", self.offered / prefills, now.at_s)
        if not self._itl_can_be_kept():
            return
        generated = total.work["decode"]
        crowd = generated.generated_tokens / max(1, generated.steps)
        if total.itl.count >= 10 * ENOUGH and total.itl.share_within(targets.itl_s) < targets.goal and crowd > 1.5:
            self._lower("decode", generated.generated_tokens / total.seconds / max(1, decodes), now.at_s)

    def _late_by_waiting(self, work: Work, workers: int) -> float:
        waited_s = work.waiting_s / max(1, work.accepted)
        some = waits(workers, self.offered)
        return some * exp(-some * self._patience_s() / waited_s) if waited_s > 0 else 0.0

    def _lower(self, role: Planned, load: float, now_s: float) -> None:
        known = self._ceilings.get(role)
        if load > 0 and (known is None or load < known.load or now_s - known.at_s > self._targets.memory_s):
            self._ceilings[role] = _Ceiling(load, now_s)

    def _under_ceiling(self, role: Planned, load: float, now_s: float) -> int:
        ceiling = self._ceilings.get(role)
        if ceiling is None or now_s - ceiling.at_s > self._targets.memory_s:
            return 1
        return max(1, ceil(load / (CEILING * ceiling.load)))
