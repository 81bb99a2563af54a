"""Builds the mesh's prompts from a validated request and its token ids."""

import random
from collections.abc import Sequence
from typing import Final

from components.errors import NoDecodeInstance, PromptTooLong, Rejected, UnknownModel
from components.openai.completions import check_vocabulary
from components.openai.fields import GenerationFields
from components.output.plan import OutputPlan
from components.text.sampling_defaults import SamplingDefaults
from components.wire.codec import MAX_MESSAGE_BYTES
from components.wire.logprobs import packed_bytes
from components.wire.sampling import Constraint, SamplingParams
from services.frontend.ports import Mesh, Prompt, ServedModel

MAX_NAMED: Final = 8  # models in the error for an unknown one


def find_model(models: Sequence[ServedModel], name: str) -> ServedModel:
    """Return the named model. Raises: UnknownModel; NoDecodeInstance, if no instance is usable, so no name is known."""
    for model in models:
        if model.name == name:
            return model
    if not models:
        raise NoDecodeInstance("no decode instance is usable")
    there = ", ".join(f"'{model.name}'" for model in models[:MAX_NAMED]) + (", …" if len(models) > MAX_NAMED else "")
    raise UnknownModel(
        f"The model '{name}' does not exist. There {'are' if len(models) > 1 else 'is'} {there}.", param="model"
    )


def find_generator(mesh: Mesh, name: str) -> ServedModel:
    """Return the named model, which must generate text. Raises: as `find_model`; Rejected, for an embedding model."""
    model = find_model(mesh.models(), name)
    if model.embedding is not None:
        raise Rejected(
            f"The model '{name}' computes embeddings and does not generate text; send its texts to /v1/embeddings.",
            param="model",
            code="unsupported_model",
        )
    return model


def token_budget(prompt_tokens: int, wanted: int | None, model: ServedModel, param: str) -> int:
    """Return the maximum number of tokens to generate: as requested, else the rest of the context. Raises: Rejected."""
    if prompt_tokens < 1:
        raise Rejected(f"'{param}' holds no tokens.", param=param, code="invalid_value")
    left = model.max_context - prompt_tokens
    if left < 1:
        raise PromptTooLong(  # langchain reads "prompt is too long"; Claude Code also the numbers, to compact its session
            f"This model's maximum context length is {model.max_context} tokens, of which the answer needs "
            f"one. The prompt is too long: {prompt_tokens} tokens > {model.max_context - 1} maximum.",
            param=param,
        )
    if wanted is not None and wanted > left:
        raise PromptTooLong(  # Claude Code reads the last sentence, and tries again with fewer `max_tokens`
            f"This model's maximum context length is {model.max_context} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} in the completion). "
            "Please reduce one of them: "
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {wanted} > {model.max_context}.",
            param=param,
        )
    return left if wanted is None else wanted


def check_prediction(prediction: Sequence[int], model: ServedModel) -> None:
    """Raises: Rejected, if it is longer than any answer."""
    if len(prediction) > model.max_context:
        raise Rejected(
            f"Invalid 'prediction.content': it has {len(prediction)} tokens. This model's maximum context length is "
            f"{model.max_context} tokens. Please shorten the prediction, or leave it out.",
            param="prediction.content",
            code="invalid_value",
        )


def make_prompt(
    request_id: str,
    request: GenerationFields,
    token_ids: list[int],
    *,
    max_tokens: int,
    deadline_unix_ms: int,
    priority: int,
    cache_salt: str,
    defaults: SamplingDefaults,
    constraint: Constraint | None,
    prediction: Sequence[int],
    echo: str,
    output: OutputPlan | None,
) -> Prompt:
    """Build a prompt, with all defaults filled in. Raises: Rejected."""
    _check_logprobs(request, len(token_ids))
    return Prompt(
        request_id=request_id,
        model=request.model,
        token_ids=token_ids,
        sampling=_sampling(request, max_tokens, defaults, constraint),
        cache_salt=cache_salt,
        deadline_unix_ms=deadline_unix_ms,
        priority=priority,
        session=request.session,
        prediction=prediction,
        stops=request.stop,
        echo=echo,
        generates=max_tokens > 0,
        continues=request.continues,
        output=output,
        shows_special=request.skip_special_tokens is False,
        shows_end=bool(request.include_stop_str_in_output),
        echo_alternatives=request.echo_alternatives,
    )


def _check_logprobs(request: GenerationFields, num_tokens: int) -> None:
    """Raises: Rejected, if the prompt's log-probabilities do not fit into a message of the mesh."""
    alternatives = request.prompt_alternatives
    if alternatives is not None and packed_bytes(num_tokens, alternatives) > MAX_MESSAGE_BYTES // 2:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise Rejected(
            f"Invalid '{param}': {alternatives} for each of the prompt's {num_tokens} tokens are more than can be returned. "
            "Please ask for fewer, or shorten the prompt.",
            param=param,
            code="invalid_value",
        )


def _sampling(
    request: GenerationFields, max_tokens: int, defaults: SamplingDefaults, constraint: Constraint | None
) -> SamplingParams:
    """Use the client's values, else those of the model's authors, else OpenAI's defaults. Raises: Rejected."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise Rejected(
            f"Invalid 'min_tokens': it is {min_tokens}, and at most {max_tokens} tokens can be generated.",
            param="min_tokens",
            code="invalid_value",
        )
    return SamplingParams(
        max_tokens=max(max_tokens, 1),  # the mesh always generates at least one token
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=int(_first(request.top_k, defaults.top_k)),
        min_p=_first(request.min_p, defaults.min_p),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((request.logit_bias or {}).items()),
        min_tokens=min_tokens,
        seed=random.getrandbits(63) if request.seed is None else request.seed,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=request.alternatives,
        prompt_logprobs=request.prompt_alternatives,
        n=request.n or 1,
        constraint=constraint,
    )


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def check_token_fields(request: GenerationFields, vocab_size: int) -> None:
    """Raises: Rejected, if a stop token or a biased one is not in the vocabulary."""
    check_vocabulary(request.stop_token_ids or (), vocab_size, "stop_token_ids")
    check_vocabulary(list(request.logit_bias or ()), vocab_size, "logit_bias")
