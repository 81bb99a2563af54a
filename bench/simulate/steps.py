"""Many steps of a simulated worker taken at once: who is in them, how long they take, what they have done."""

from dataclasses import dataclass, field
from enum import Enum, auto
from math import ceil, sqrt
from typing import Any

from bench.simulate.traffic import Request


class Part(Enum):
    """What of a request a worker does."""

    FULL = auto()
    PREFILL = auto()  # the prompt and its first token
    DECODE = auto()  # what follows, once the KV is there


@dataclass(slots=True, eq=False)
class Stay:
    """One request at one worker."""

    request: Request
    part: Part
    tokens: int  # to be computed or found before the next one can be drawn
    left: int  # tokens to draw here; once it decodes, those that were left when it began to
    turn: tuple[int, int] = (0, 0)  # its place among prompts
    cached: int = 0  # of `tokens`, found here
    computed: int = 0  # of `tokens`, found and computed
    began_s: float = 0.0  # computing
    shared: list[bytes] = field(default_factory=list)  # its blocks
    private: int = 0  # its pages
    flow: Any = None  # the owner's
    gone: bool = False  # its request has left: what is done for it is dropped


@dataclass(slots=True)
class Run:
    """Steps from `start_s` on: the first takes `first_s`, each further one `grow_s` more than the one before."""

    start_s: float
    first_s: float
    grow_s: float
    steps: int
    decodes: int
    chunks: list[tuple[Stay, int]]  # tokens of each step

    def seconds(self, steps: int) -> float:
        """Until `steps` of its steps are over."""
        return steps * self.first_s + self.grow_s * (steps * (steps - 1) / 2)

    def steps_until(self, now_s: float) -> int:
        """Steps that are over at `now_s`, counting one that is not yet, at most all."""
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
    """What a worker has done since it came: the counters of its metrics page."""

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0

    def add(self, run: Run, steps: int) -> None:
        """Count `steps` steps of `run`."""
        self.busy_s += run.seconds(steps)
        self.steps += steps
        self.prompt_tokens += steps * sum(length for _, length in run.chunks)
        self.generated_tokens += steps * run.decodes
