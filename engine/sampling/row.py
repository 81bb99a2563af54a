"""A request's sampling state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.ports import TokenMask

if TYPE_CHECKING:  # the mock engine starts without numpy
    from engine.sampling.seen import SeenTokens

NO_TOKEN: Final = -1  # drawn for a row whose logits are not finite: its request fails


class Row:
    __slots__ = (
        "adjusts",
        "end_ids",
        "eos_ids",
        "logprobs",
        "mask",
        "params",
        "penalised",
        "prompt_logprobs",
        "seen",
        "start",
        "tokens",
    )

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        mask: TokenMask | None = None,
    ) -> None:
        """`tokens` is extended by others; the first `num_prompt_tokens` are the prompt."""
        self.params = params
        self.tokens = tokens
        self.mask = mask
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.end_ids = sorted(ends)  # these end the text
        self.eos_ids = sorted(eos_token_ids)
        self.penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        self.adjusts = bool(self.penalised or params.logit_bias or params.min_tokens or mask is not None)
        self.logprobs: TokenLogprobs | None = None  # of the latest draw
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.start = num_prompt_tokens  # index of the first generated token
        self.seen: SeenTokens | None = None  # for penalties; the sampler keeps it

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def must_go_on(self) -> bool:
        """Whether `min_tokens` are still to come."""
        return len(self.tokens) - self.start < self.params.min_tokens
