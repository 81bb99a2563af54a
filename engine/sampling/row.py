"""A request's sampling state."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Final

from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from engine.ports import TokenMask

if TYPE_CHECKING:  # the mock engine starts without numpy
    from engine.sampling.seen import SeenTokens

NO_TOKEN: Final = -1  # for logits that are not finite; the request then fails


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
        """`tokens` begins with the prompt, and the request appends to it."""
        self.params = params
        self.tokens = tokens
        self.mask = mask
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.end_ids = sorted(ends)
        self.eos_ids = sorted(eos_token_ids)
        self.penalised = is_penalised(params)
        self.adjusts = bool(self.penalised or params.logit_bias or params.min_tokens or mask is not None)
        self.logprobs: TokenLogprobs | None = None  # of the latest draw
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.start = num_prompt_tokens  # index of the first generated token
        self.seen: SeenTokens | None = None  # for penalties

    def rows_after(self, drafts: Sequence[int]) -> "list[Row]":
        """Return a row for the draw after each draft, up to the first that the mask forbids or that ends the answer."""
        rows: list[Row] = []
        mask = self.mask
        if mask is not None:
            drafts = drafts[: mask.allows(drafts)]
        for count, draft in enumerate(drafts, 1):
            if draft in self.end_ids:
                break
            if mask is not None:
                mask = mask.fork()
                mask.accept(draft)
                if mask.fault is not None or mask.is_complete:
                    break
            row = copy(self)
            row.tokens = [*self.tokens, *drafts[:count]]
            row.mask = mask
            row.seen = None
            rows.append(row)
        return rows

    @property
    def must_go_on(self) -> bool:
        return len(self.tokens) - self.start < self.params.min_tokens


def is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
