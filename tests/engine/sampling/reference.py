"""A second implementation of sampling, by rows and tokens, in Python floats."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from components.wire.sampling import SamplingParams
from engine.device.copies import Arrival
from engine.sampling.row import Row
from engine.sampling.sampler import Sampler, choose_sampler
from tests.device import TESTED

GOLDEN = 0x9E3779B97F4A7C15


def make_row(tokens: Sequence[int], num_prompt_tokens: int | None = None, **params: Any) -> Row:
    prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    eos = params.pop("eos", frozenset())
    mask = params.pop("mask", None)
    return Row(SamplingParams(**{"max_tokens": 100, **params}), tokens, prompt, eos, mask)


def engines_sampler() -> Sampler:
    """Make the engine's sampler, on the tested device."""
    return choose_sampler(torch.device(TESTED["device"]))


def sample(logits: torch.Tensor, rows: Sequence[Row], sampler: Sampler | None = None) -> list[int]:
    """Draw on the tested device, by default with the engine's sampler, and wait for the tokens."""
    device = torch.device(TESTED["device"])
    draw = (sampler or engines_sampler()).draw(logits.to(device), rows)
    Arrival(device).wait()
    return draw.read()


def noise_word(seed: int, position: int, token: int) -> int:
    """Return 32 random bits of a token, in Python integers."""
    start = splitmix((seed + GOLDEN) % 2**64)
    key = splitmix((start + (position + 1) * GOLDEN) % 2**64)
    word = finalised((token * 0x9E3779B9 + key) % 2**32)
    return finalised((word + (key >> 32)) % 2**32)


def finalised(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def splitmix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    ends: Sequence[int],
) -> list[float]:
    out = list(logits)
    for token in range(len(out)):
        if token in prompt or token in generated:
            rep = params.repetition_penalty
            out[token] = out[token] / rep if out[token] > 0 else out[token] * rep
        count = list(generated).count(token)
        out[token] -= params.frequency_penalty * count
        if count:
            out[token] -= params.presence_penalty
    for token, value in params.logit_bias:
        out[token] += value
    if len(generated) < params.min_tokens:
        for token in ends:
            out[token] = -math.inf
    return out


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the distribution of a token."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    probs = normalised([p if p >= params.min_p * max(probs) else 0.0 for p in probs])
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k > 0:
        probs = normalised([p if order.index(token) < params.top_k else 0.0 for token, p in enumerate(probs)])
    if params.top_p < 1:
        kept: set[int] = set()
        for token in order:
            if math.fsum(probs[other] for other in kept) >= params.top_p:
                break
            kept.add(token)
        probs = normalised([p if token in kept else 0.0 for token, p in enumerate(probs)])
    return probs


def normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def scores(probs: Sequence[float], seed: int, position: int) -> dict[int, float]:
    """Return the scores of possible tokens, of which the highest is drawn."""
    shares = {token: (noise_word(seed, position, token) + 0.5) / 2**32 for token, p in enumerate(probs) if p > 0}
    return {token: math.log(probs[token]) - math.log(-math.log1p(-share)) for token, share in shares.items()}
