"""Convert a message's sampling parameters."""

from components.wire.sampling import Sampling, unpack_bias
from components.wire.tokens import unpack_tokens
from engine.ports import SamplingParams


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Convert parameters, which the engine checks.

    Raises: MalformedMessage, for bytes that are no numbers.
    """
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=tuple(unpack_tokens(sampling.stop_token_ids)),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(unpack_bias(sampling)),
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        n=sampling.n,
    )
