"""How tokens are to be drawn: the part that a request carries from the frontend to decode and on to prefill, unchanged."""

import sys
from array import array
from collections.abc import Mapping
from typing import Literal

from components.errors import MalformedMessage
from components.wire.codec import Struct
from components.wire.tokens import pack_tokens, unpack_tokens


class Constraint(Struct):
    """What the answer must be, in the one form to which every request field comes down."""

    kind: Literal[
        "json_schema", "regex", "lark"
    ]  # json_object is the schema {"type": "object"}, a choice a lark grammar
    text: str  # JSON of the schema, the regular expression, or the grammar as llguidance reads it


class Sampling(Struct):
    """`engine.ports.SamplingParams` says what the fields mean, `engine.sampling.check` what they may be."""

    max_tokens: int  # still to generate
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias_ids: bytes = b""  # int32[K]
    logit_bias_values: bytes = b""  # float32[K], little-endian as the ids
    min_tokens: int = 0  # of the whole answer, what was generated before a move included
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: bytes = b""  # int32[S]
    logprobs: int | None = None  # alternatives to report with each token; 0: the chosen one alone
    prompt_logprobs: int | None = None  # likewise for the prompt, which decode then computes itself
    n: int = 1  # branches that share the prompt, each with a seed of its own and a stream of its own
    num_generated: int = 0  # of the request's token ids, the last ones that belong to the answer: it was moved
    constraint: Constraint | None = None  # the answer's text, from its first token on


def pack_bias(bias: Mapping[int, float]) -> tuple[bytes, bytes]:
    """`logit_bias_ids` and `logit_bias_values`."""
    values = array("f", bias.values())
    if sys.byteorder == "big":
        values.byteswap()
    return pack_tokens(list(bias)), values.tobytes()


def unpack_bias(sampling: Sampling) -> list[tuple[int, float]]:
    """Pairs of token id and what to add. Raises: MalformedMessage, when there are not as many values as ids."""
    ids = unpack_tokens(sampling.logit_bias_ids)
    if len(sampling.logit_bias_values) != 4 * len(ids):
        raise MalformedMessage(f"{len(ids)} biased token ids and {len(sampling.logit_bias_values)} bytes of values")
    values = array("f")
    values.frombytes(sampling.logit_bias_values)
    if sys.byteorder == "big":
        values.byteswap()
    return list(zip(ids, values.tolist(), strict=True))
