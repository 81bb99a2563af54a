"""Limit prompt chunks beside decodes by measured time, so that streams do not stall.

Source: chunked prefill, Agrawal et al. 2023, "SARATHI", arXiv:2308.16369.
"""

from typing import Final

BESIDE_S: Final = 0.1  # target delay of decodes
FEWEST: Final = 32  # tokens; each step has a fixed cost
UNKNOWN: Final = 64  # tokens, before the speed is known
SMOOTHING: Final = 0.3


class ChunkLimit:
    def __init__(self) -> None:
        self._decode_s = 0.0  # of a step without prompts
        self._tokens_per_s = 0.0  # of prompts; 0: unknown

    @property
    def tokens(self) -> int:
        return max(FEWEST, int(BESIDE_S * self._tokens_per_s)) if self._tokens_per_s else UNKNOWN

    def stepped(self, prompt_tokens: int, decode_tokens: int, step_s: float) -> None:
        if prompt_tokens >= FEWEST:
            prompt_s = max(step_s - (self._decode_s if decode_tokens else 0.0), step_s / 2, 1e-6)
            self._tokens_per_s = _smoothed(self._tokens_per_s, prompt_tokens / prompt_s)
        elif not prompt_tokens and decode_tokens:
            self._decode_s = _smoothed(self._decode_s, step_s)


def _smoothed(before: float, latest: float) -> float:
    return before + SMOOTHING * (latest - before) if before else latest
