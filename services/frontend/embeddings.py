"""`/v1/embeddings`: texts to vectors."""

import asyncio
import time
from typing import Final

from components.errors import PromptTooLong, Rejected
from components.openai.completions import check_vocabulary
from components.openai.embeddings import EmbeddingRequest, embedding_list
from components.openai.parts import Parts
from components.text.tokenizer import TextModel
from components.wire.embed import EmbeddingModel
from services.frontend.gate import caller_of
from services.frontend.ports import ServedModel, Texts
from services.frontend.prompts import find_model
from services.frontend.unary import Call

TEXTS_PER_TURN: Final = 4  # short texts tokenised on the event loop before other requests get a turn


async def embed(call: Call, request: EmbeddingRequest) -> Parts:
    """Answer with the vectors. The JSON is written while the client reads it. Raises: MeshError."""
    frontend = call.frontend
    model = find_model(frontend.mesh.models(), request.model)
    about = _embedding_of(model)
    request.check(about)
    call.model = model.name
    call.timeline.root.update_name(f"embeddings {model.name}")
    started = time.perf_counter()
    call.timeline.begin("frontend.tokenize")
    inputs = await _encoded(frontend.text, request, model)
    call.prompt_tokens = num_tokens = sum(map(len, inputs))
    caller = caller_of(call.scope)
    priority = caller.priority(request.priority, frontend.settings.best_priority)
    salt = caller.cache_salt(request.cache_salt, shared=frontend.settings.share_prefix_cache)
    texts = Texts(call.id, model.name, inputs, call.deadline_unix_ms, salt, priority)
    ticket = caller.enter(
        frontend.admission,
        frontend.metrics,
        priority=priority,
        prompt_tokens=num_tokens,
        choices=len(inputs),
    )
    try:
        with frontend.metrics.running.labels(model.name).track_inprogress():
            call.timeline.begin("frontend.admit")
            await ticket.admitted()
            call.timeline.pause()
            vectors = await frontend.mesh.embed(texts)
    finally:
        caller.leave(frontend.admission, ticket, prompt_tokens=num_tokens)
    frontend.metrics.prompt_tokens.labels(model.name).inc(num_tokens)
    if caller.account is not None:
        frontend.metrics.key_tokens.labels(caller.account.name, "prompt").inc(num_tokens)
    call.timeline.root.set_attribute("gen_ai.usage.input_tokens", num_tokens)

    def answer() -> Parts:
        yield from embedding_list(vectors, request, about, num_tokens)
        frontend.metrics.e2e_latency.labels(model.name, "/v1/embeddings").observe(time.perf_counter() - started)

    return answer()


def _embedding_of(model: ServedModel) -> EmbeddingModel:
    """Raises: Rejected, if the model computes no embeddings."""
    if model.embedding is None:
        raise Rejected(
            f"The model '{model.name}' generates text and computes no embeddings. Serve an embedding model, such "
            "as Qwen/Qwen3-Embedding-0.6B or any directory with sentence-transformers' modules.json.",
            param="model",
            code="unsupported_model",
        )
    return model.embedding


async def _encoded(text: TextModel, request: EmbeddingRequest, model: ServedModel) -> list[list[int]]:
    """Token ids of each input. Raises: Rejected, PromptTooLong."""
    kept = request.truncate_prompt_tokens
    if kept is not None:
        kept = model.max_context if kept == -1 else kept
    inputs: list[list[int]] = []
    for i, given in enumerate(request.input):
        if isinstance(given, str):
            ids = await text.encode_text(given, add_special_tokens=request.add_special_tokens is not False)
        else:
            check_vocabulary(given, text.vocab_size, "input")
            ids = given
        if kept is not None:
            ids = ids[len(ids) - kept :] if kept < len(ids) else ids
        if not ids:
            raise Rejected(f"'input[{i}]' holds no tokens.", param=f"input[{i}]", code="invalid_value")
        if len(ids) > model.max_context:
            raise PromptTooLong(
                f"This model's maximum context length is {model.max_context} tokens. However, 'input[{i}]' has "
                f"{len(ids)} tokens. Please shorten it, or send 'truncate_prompt_tokens'.",
                param="input",
            )
        inputs.append(ids)
        if i % TEXTS_PER_TURN == TEXTS_PER_TURN - 1:
            await asyncio.sleep(0)
    return inputs
