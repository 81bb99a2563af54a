"""Bounds of sampling parameters, as in OpenAI's API and vLLM."""

import logging
from collections.abc import Sequence
from math import isfinite
from typing import Final

from components.errors import Rejected
from components.wire.sampling import SamplingParams

log = logging.getLogger(__name__)

MAX_LOGIT_BIAS: Final = 1024
MAX_LOGPROBS: Final = 20  # OpenAI's bound on top_logprobs
MAX_STOP_TOKENS: Final = 128
MAX_BRANCHES: Final = 128
INT32_MAX: Final = 2**31 - 1
RANGES: Final[dict[str, tuple[float, float]]] = {  # inclusive
    "max_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "temperature": (0, 100),
    "top_k": (-1, INT32_MAX),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_BRANCHES),
}
MAX_BIAS: Final = 100


def end_tokens(ids: int | Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """Return a model's end tokens without those outside its vocabulary, which are never drawn."""
    named = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    known = frozenset(token_id for token_id in named if 0 <= token_id < vocab_size)
    if unknown := named - known:
        log.warning("end tokens outside the vocabulary", extra={"ids": sorted(unknown), "vocab_size": vocab_size})
    return known


def check_sampling(
    params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int], num_generated: int = 0
) -> None:
    """Raises: Rejected, with the parameter and its bounds."""
    for name in RANGES:
        _check_range(params, name)
    if not 0 <= params.top_p <= 1:
        raise Rejected(f"top_p is {params.top_p}; it must be from 0 to 1", param="top_p")
    if params.min_tokens > params.max_tokens + num_generated:
        raise Rejected(
            f"min_tokens is {params.min_tokens}; it must not exceed max_tokens, which is "
            f"{params.max_tokens + num_generated}",
            param="min_tokens",
        )
    _check_bias(params, vocab_size)
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise Rejected(
            f"stop_token_ids has {len(params.stop_token_ids)} ids, at most {MAX_STOP_TOKENS} are allowed",
            param="stop_token_ids",
        )
    check_token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    if params.min_tokens and len(eos_token_ids.union(params.stop_token_ids)) >= vocab_size:
        raise Rejected("min_tokens is not possible, because every token would end the text", param="min_tokens")


def check_branches(params: SamplingParams) -> None:
    """Check `n`, before objects are created for each branch. Raises: Rejected."""
    _check_range(params, "n")


def _check_range(params: SamplingParams, name: str) -> None:
    value, (low, high) = getattr(params, name), RANGES[name]
    if value is not None and not low <= value <= high:  # NaN is in no range
        raise Rejected(f"{name} is {value}; it must be between {low} and {high}", param=name)


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise Rejected(
            f"logit_bias has {len(bias)} token ids, at most {MAX_LOGIT_BIAS} are allowed", param="logit_bias"
        )
    check_token_ids([token for token, _ in bias], vocab_size, "logit_bias")
    if len({token for token, _ in bias}) < len(bias):
        raise Rejected("logit_bias contains a token id twice", param="logit_bias")
    for token, value in bias:
        if not (isfinite(value) and -MAX_BIAS <= value <= MAX_BIAS):
            raise Rejected(
                f"logit_bias of token id {token} is {value}; it must be between -{MAX_BIAS} and {MAX_BIAS}",
                param="logit_bias",
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):  # faster than checking each
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise Rejected(f"{param}: token id {wrong} is not in the vocabulary of {vocab_size}", param=param)
