"""Figures of a simulated run."""

import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, Final

from bench.load.report import quantile_ms
from bench.simulate.traffic import Request

BINS: Final = 64  # bins per factor of e, so gaps have a resolution of 1.6 %


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    role: str
    alive_s: float
    busy_s: float
    prompt_tokens: int
    cached_tokens: int
    devices: int = 1


def _times() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Measured:
    slo: Slo
    ttft_s: "array[float]" = field(default_factory=_times)
    tpot_s: "array[float]" = field(default_factory=_times)  # for answers with more than one token
    e2e_s: "array[float]" = field(default_factory=_times)
    gaps: Counter[int] = field(default_factory=Counter)  # tokens by the logarithm of the gap before them
    firsts: Counter[int] = field(default_factory=Counter)  # first tokens by the logarithm of their TTFT
    firsts_s: float = 0.0  # sum of all TTFTs
    good: int = 0
    arrived: int = 0
    refused: int = 0  # requests longer than any worker's memory
    unserved: int = 0  # requests for which no worker was left
    moved: int = 0  # requests sent elsewhere, or computed on decode, after a failure
    output_tokens: int = 0
    duration_s: float = 0.0  # virtual
    in_flight_s: float = 0.0  # requests in flight, integrated over time
    events: int = 0
    cpu_s: float = 0.0  # CPU time of the simulation
    workers: list[Share] = field(default_factory=list)

    def began(self, request: Request) -> None:
        ttft_s = max(request.first_s - request.at_s, 1e-6)
        self.firsts[int(log(ttft_s) * BINS // 1)] += 1
        self.firsts_s += ttft_s

    def finished(self, request: Request, now_s: float) -> None:
        ttft_s, e2e_s = request.first_s - request.at_s, now_s - request.at_s
        tpot_s = (e2e_s - ttft_s) / (request.output - 1) if request.output > 1 else 0.0
        self.ttft_s.append(ttft_s)
        self.e2e_s.append(e2e_s)
        if request.output > 1:
            self.tpot_s.append(tpot_s)
        self.output_tokens += request.output
        self.good += ttft_s <= self.slo.ttft_s and tpot_s <= self.slo.tpot_s

    def stepped(self, steps: int, each_s: float, decodes: int) -> None:
        if each_s > 0:
            self.gaps[int(log(each_s) * BINS // 1)] += steps * decodes

    def itl_s(self, quantile: float) -> float:
        left = quantile * self.gaps.total()
        for gap in sorted(self.gaps):
            left -= self.gaps[gap]
            if left <= 0:
                return exp((gap + 0.5) / BINS)
        return 0.0

    def figures(self, **facts: Any) -> dict[str, Any]:
        prompts = sum(worker.prompt_tokens for worker in self.workers) or 1
        alive_s = sum(worker.alive_s for worker in self.workers) or 1.0
        device_s = sum(worker.alive_s * worker.devices for worker in self.workers) or 1.0
        return {
            **facts,
            "requests": len(self.ttft_s),
            "refused": self.refused,
            "unserved": self.unserved,
            "moved": self.moved,
            **{f"ttft_ms_p{q}": quantile_ms(self.ttft_s, q / 100) for q in (50, 90, 99)},
            **{f"itl_ms_p{q}": round(self.itl_s(q / 100) * 1000, 2) for q in (50, 90, 99)},
            "tpot_ms_p50": quantile_ms(self.tpot_s, 0.5),
            "cache_hit": round(sum(worker.cached_tokens for worker in self.workers) / prompts, 4),
            **{f"{role}_{name}": value for role in self._roles() for name, value in self._spread(role).items()},
            "worker_s": round(alive_s),
            "slo": round(self.good / max(1, self.arrived), 4),
            "goodput_per_worker": round(self.good / alive_s, 5),
            "device_s": round(device_s),
            "goodput_per_device": round(self.good / device_s, 5),
            "req_s": round(len(self.ttft_s) / self.duration_s, 2) if self.duration_s else 0.0,
            "duration_s": round(self.duration_s, 1),
            "events": self.events,
            "cpu_s": round(self.cpu_s, 1),
        }

    def _roles(self) -> list[str]:
        return sorted({worker.role for worker in self.workers}, reverse=True)

    def _spread(self, role: str) -> dict[str, float]:
        """Return deviation and maximum of a role's load, relative to the mean."""
        busy = [w.busy_s / w.alive_s for w in self.workers if w.role == role and w.alive_s > 0]
        mean = statistics.fmean(busy) if busy else 0.0
        if not mean:
            return {"busy": 0.0, "spread": 0.0, "most": 0.0}
        spread = statistics.pstdev(busy) / mean
        return {"busy": round(mean, 3), "spread": round(spread, 3), "most": round(max(busy) / mean, 2)}
