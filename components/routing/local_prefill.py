"""Whether a prompt is computed sooner where it will be decoded, because every prefill instance has a queue."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.2  # weight of the latest step
MARGIN_S: Final = 0.5  # what the news of a queue may have missed: the time between two heartbeats during a step


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """What one worker has to compute, and how fast it does."""

    queued_tokens: int  # prompt tokens accepted and not computed
    tokens_per_s: float  # of prompts; 0: none was computed yet
    age_s: float = 0.0  # of this news: it has computed since

    def seconds_for(self, tokens: int, usual: float) -> float:
        """Until what is queued and `tokens` more are computed; `usual` is the speed of a worker that is not known."""
        return max(0.0, (self.queued_tokens + tokens) / (self.tokens_per_s or usual) - self.age_s)


class PromptRate:
    """Prompt tokens a second, averaged over the latest steps that computed any."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def stepped(self, prompt_tokens: int, step_s: float) -> None:
        """One engine step. Decodes in the same step count as time: it is what a prompt has to reckon with."""
        if not prompt_tokens or step_s <= 0:
            return
        now = prompt_tokens / step_s
        self.tokens_per_s += SMOOTHING * (now - self.tokens_per_s) if self.tokens_per_s else now


def sooner_here(tokens: int, here: PromptLoad, there: Iterable[PromptLoad]) -> bool:
    """Whether `tokens` would be computed here, by a margin, before any worker `there` had begun with them.

    False while nobody's speed is known.
    """
    others = list(there)
    speeds = [load.tokens_per_s for load in (here, *others) if load.tokens_per_s]
    if not others or not speeds:
        return False
    usual = max(speeds)
    return min(load.seconds_for(0, usual) for load in others) > here.seconds_for(tokens, usual) + MARGIN_S
