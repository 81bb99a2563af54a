"""Made-up embeddings and log-probabilities, equal on every worker."""

import math
import random
import sys
from array import array
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from components.wire.embed import EmbeddingModel
from components.wire.logprobs import TokenLogprobs
from components.wire.tokens import pack_tokens
from engine.scheduler.scheduler import Chunk


def made_up_vector(checksum: int, model: EmbeddingModel) -> bytes:
    draw = random.Random(checksum)
    values = [draw.gauss(0.0, 1.0) for _ in range(model.dimensions)]
    length = math.hypot(*values) if model.normalised else 1.0
    vector = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


STEPS: Final = 1024  # per unit; all exact in float32


def made_up(checksum: int, token_id: int, alternatives: int, alphabet: Sequence[int]) -> TokenLogprobs:
    logprob = -(checksum % STEPS) / STEPS
    others = [other for other in alphabet[:alternatives] if other != token_id]
    top = [(other, logprob - i) for i, other in enumerate([token_id, *others][:alternatives])]
    return TokenLogprobs(logprob, tuple(top))


def leave_prompt_logprobs(chunk: Chunk, alphabet: Sequence[int]) -> None:
    request = chunk.request
    told, alternatives = request.row.prompt_logprobs, request.sampling.prompt_logprobs
    if told is None or alternatives is None:
        return
    for position in range(len(told) + 1, min(chunk.end + 1, request.prompt_len)):
        checksum = crc32(pack_tokens([position, request.tokens[position]]))
        told.append(made_up(checksum, request.tokens[position], alternatives, alphabet))
