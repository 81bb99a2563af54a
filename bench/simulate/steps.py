"""Many steps of a simulated worker at once."""

from dataclasses import dataclass, field
from enum import Enum, auto
from math import ceil, sqrt
from typing import Any

from bench.simulate.traffic import Request


class Part(Enum):
    FULL = auto()
    PREFILL = auto()  # the prompt and its first token
    DECODE = auto()  # the rest, after the KV has arrived


@dataclass(slots=True, eq=False)
class Stay:
    request: Request
    part: Part
    tokens: int  # to be computed or found before the next one is drawn
    left: int  # tokens left to draw here, as of the start of decoding
    turn: tuple[int, int] = (0, 0)  # its place in the queue
    cached: int = 0  # of `tokens`
    computed: int = 0  # of `tokens`, cached ones included
    began_s: float = 0.0  # computing
    shared: list[bytes] = field(default_factory=list)  # blocks
    private: int = 0  # pages
    flow: Any = None  # the owner's
    gone: bool = False  # its request has left: results are dropped


@dataclass(slots=True)
class Run:
    """Steps from `start_s` on; the first takes `first_s`, each further one `grow_s` more."""

    start_s: float
    first_s: float
    grow_s: float
    steps: int
    decodes: int
    chunks: list[tuple[Stay, int]]  # tokens of each step

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.grow_s * (steps * (steps - 1) / 2)

    def steps_until(self, now_s: float) -> int:
        wanted = now_s - self.start_s
        if self.first_s <= 0:
            return self.steps
        if self.grow_s <= 0:
            found = ceil(wanted / self.first_s - 1e-9)
        else:  # g/2 n² + (f - g/2) n = wanted
            half, linear = self.grow_s / 2, self.first_s - self.grow_s / 2
            found = ceil((sqrt(linear * linear + 4 * half * wanted) - linear) / (2 * half) - 1e-9)
        return min(self.steps, max(1, found))


@dataclass(slots=True)
class Progress:
    """Counters of a worker's metrics page."""

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0

    def add(self, run: Run, steps: int) -> None:
        self.busy_s += run.seconds(steps)
        self.steps += steps
        self.prompt_tokens += steps * sum(length for _, length in run.chunks)
        self.generated_tokens += steps * run.decodes
