"""Sampling parameters, which go unchanged from the frontend to the engines of decode and prefill."""

from typing import Literal

from components.wire.codec import Struct


class Constraint(Struct):
    kind: Literal["json_schema", "regex", "lark"]
    text: str  # a JSON schema, a regular expression, or a grammar for llguidance


class SamplingParams(Struct):
    """How tokens are drawn. The draw at position p depends on (seed, p) alone, never on the batch.

    Order: penalties, `logit_bias`, constraint, temperature, then min_p, top_k and top_p, each on what the one
    before left. `engine.sampling.check` has the bounds.
    """

    max_tokens: int  # still to generate
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # of the most probable token's probability
    presence_penalty: float = 0.0  # once for each token generated so far
    frequency_penalty: float = 0.0  # for each time it was generated
    repetition_penalty: float = 1.0  # of tokens in the prompt or generated; divides positive logits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, summand), no id twice
    min_tokens: int = 0  # of the whole answer; before that, no token that ends the text is drawn
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives to report with each token; 0: the token alone
    prompt_logprobs: int | None = None  # the same for the prompt, which decode then computes whole
    n: int = 1  # branches that share the prompt; each has a seed derived from `seed`, branch 0 `seed` itself
    constraint: Constraint | None = None  # services compile it to `EngineRequest.mask`
