"""Sampling parameters, the same for frontend, decode and prefill."""

import sys
from array import array
from collections.abc import Mapping
from typing import Literal

from components.errors import MalformedMessage
from components.wire.codec import Struct
from components.wire.tokens import pack_tokens, unpack_tokens


class Constraint(Struct):
    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(Struct):
    """`engine.ports.SamplingParams` has the meanings, `engine.sampling.check` the limits."""

    max_tokens: int  # still to generate
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias_ids: bytes = b""  # int32[K]
    logit_bias_values: bytes = b""  # float32[K], little-endian
    min_tokens: int = 0  # with the tokens before a move
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: bytes = b""  # int32[S]
    logprobs: int | None = None  # alternatives; 0: the token alone
    prompt_logprobs: int | None = None  # decode then computes the prompt
    n: int = 1  # branches
    num_generated: int = 0  # of `token_ids`, after a move
    constraint: Constraint | None = None


def pack_bias(bias: Mapping[int, float]) -> tuple[bytes, bytes]:
    values = array("f", bias.values())
    if sys.byteorder == "big":
        values.byteswap()
    return pack_tokens(list(bias)), values.tobytes()


def unpack_bias(sampling: Sampling) -> list[tuple[int, float]]:
    ids = unpack_tokens(sampling.logit_bias_ids)
    if len(sampling.logit_bias_values) != 4 * len(ids):
        raise MalformedMessage(f"{len(ids)} biased token ids and {len(sampling.logit_bias_values)} bytes of values")
    values = array("f")
    values.frombytes(sampling.logit_bias_values)
    if sys.byteorder == "big":
        values.byteswap()
    return list(zip(ids, values.tolist(), strict=True))
