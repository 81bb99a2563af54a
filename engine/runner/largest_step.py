"""The step that needs the most memory: the maximum numbers of prompt tokens and draws."""

from collections.abc import Sequence

import torch

from components.wire.sampling import SamplingParams
from engine.config import StepSize
from engine.model.load import LoadedModel
from engine.model.pooling import Pooling
from engine.ports import Phase
from engine.runner.device_model import DeviceModel
from engine.runner.step_inputs import inputs_of
from engine.runner.torch_runner import TorchRunner
from engine.scheduler.request import Chunk, Request, RequestState

# the largest state that a sampler keeps for a row
SAMPLING = SamplingParams(max_tokens=1, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.1, logprobs=20)


def run_largest_step(model: DeviceModel, size: StepSize, max_context: int, loaded: LoadedModel, *, draws: bool) -> None:
    """Compute the largest step on page 0, whose content does not matter, and wait until it has ended.

    Args:
        draws: sample, too; not on a follower.
    """
    chunks = largest_chunks(size, max_context, loaded.layout.page_size, loaded.pooling)
    if draws:
        step = TorchRunner(model, pooling=loaded.pooling).launch(chunks)
        step.sample()
        step.result()
        return
    with torch.inference_mode():
        model.compute(inputs_of(chunks, [1] * len(chunks)), None)


def largest_chunks(size: StepSize, max_context: int, page_size: int, pooling: Pooling | None) -> Sequence[Chunk]:
    """Return a chunk for each request, all of which draw, in `StepShape`'s order. The last prompts get the remaining tokens."""
    lengths = [1] * size.requests
    left = size.tokens - size.requests
    for i in reversed(range(size.requests)):
        lengths[i] += min(left, max_context - 1)
        left -= lengths[i] - 1
    return [_chunk(i, length, page_size, pooling) for i, length in enumerate(sorted(lengths))]


def _chunk(i: int, length: int, page_size: int, pooling: Pooling | None) -> Chunk:
    request = Request(
        id=f"largest-{i}",
        tokens=[0] * length,
        prompt_len=length,
        limit=length + 1,
        sampling=SAMPLING,
        phase=Phase.FULL if pooling is None else Phase.EMBED,
        arrival=i,
        root_hash=b"",
        pages=[0] * -(-length // page_size),
        pools_all=pooling is not None and pooling.reads_all,
    )
    request.advance(RequestState.RUNNING)
    return Chunk(request, 0, length, samples=True, ahead=False)
