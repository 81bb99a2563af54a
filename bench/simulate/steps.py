"""Computes many steps of a simulated worker at once."""

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
    tokens: int  # tokens to be computed or found in the cache before the next one is drawn
    left: int  # tokens left to draw here, as of the start of decoding
    turn: tuple[int, int] = (0, 0)  # its place in the queue
    cached: int = 0  # cached ones of `tokens`
    computed: int = 0  # computed or cached ones of `tokens`
    began_s: float = 0.0  # start of computing
    shared: list[bytes] = field(default_factory=list)  # shared blocks
    private: int = 0  # private pages
    flow: Any = None  # the owner's object
    gone: bool = False  # whether its request has left, so that results are dropped


@dataclass(slots=True)
class Run:
    """Consecutive steps that begin at `start_s`. The first takes `first_s`, each further one `grow_s` longer."""

    start_s: float
    first_s: float
    grow_s: float
    steps: int
    decodes: int
    chunks: list[tuple[Stay, int]]  # and its tokens in each step

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
    """Counters as on a worker's metrics page."""

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0  # computed prompt tokens
    generated_tokens: int = 0

    def add(self, run: Run, steps: int) -> None:
        self.busy_s += run.seconds(steps)
        self.steps += steps
        self.prompt_tokens += steps * sum(length for _, length in run.chunks)
        self.generated_tokens += steps * run.decodes
