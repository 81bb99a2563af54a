"""Sampling parameters of frontend, decode, prefill and engine."""

from hashlib import blake2b
from typing import Literal

from components.wire.codec import Struct


class Constraint(Struct):
    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SamplingParams(Struct):
    """A draw depends on the seed and the position, never on the batch. `engine.sampling.bounds` has the bounds.

    Order: penalties, `logit_bias`, constraint, temperature, min_p, top_k, top_p.
    """

    max_tokens: int  # still to generate
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # share of the highest probability
    presence_penalty: float = 0.0  # once per token
    frequency_penalty: float = 0.0  # per occurrence
    repetition_penalty: float = 1.0  # also of prompt tokens; divides positive logits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, summand), no id twice
    min_tokens: int = 0  # of the whole answer; no end token before that
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives per token; 0: the chosen one only
    prompt_logprobs: int | None = None  # for the prompt, which decode then computes
    n: int = 1  # branches; branch 0 uses `seed` itself
    constraint: Constraint | None = None  # compiled to `EngineRequest.mask`


def branch_seed(seed: int, branch: int) -> int:
    """A single request with this seed gives the same text."""
    if branch == 0:
        return seed
    digest = blake2b(f"{seed}/{branch}".encode(), digest_size=8, person=b"kvmesh.n").digest()
    return int.from_bytes(digest, "little")
