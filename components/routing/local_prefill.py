"""Whether decode computes a prompt sooner than any prefill instance."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.2  # weight of the latest step
MARGIN_S: Final = 0.5  # interval between heartbeats


@dataclass(frozen=True, slots=True)
class PromptLoad:
    queued_tokens: int
    tokens_per_s: float  # of prompts; 0: unknown
    age_s: float = 0.0  # of the report

    def seconds_for(self, tokens: int, usual: float) -> float:
        return max(0.0, (self.queued_tokens + tokens) / (self.tokens_per_s or usual) - self.age_s)


class PromptRate:
    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def stepped(self, prompt_tokens: int, step_s: float) -> None:
        if not prompt_tokens or step_s <= 0:
            return
        now = prompt_tokens / step_s
        self.tokens_per_s += SMOOTHING * (now - self.tokens_per_s) if self.tokens_per_s else now


def sooner_here(tokens: int, here: PromptLoad, there: Iterable[PromptLoad]) -> bool:
    """Whether `tokens` end here before any worker `there` begins them. False if no speed is known."""
    others = list(there)
    speeds = [load.tokens_per_s for load in (here, *others) if load.tokens_per_s]
    if not others or not speeds:
        return False
    usual = max(speeds)
    return min(load.seconds_for(0, usual) for load in others) > here.seconds_for(tokens, usual) + MARGIN_S
