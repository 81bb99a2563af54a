"""A rank's parts of an engine: pages, attention over them, and the forward.

On a device the pages come last, because recorded graphs hold their address. First a trial with a small pool measures
memory: it compiles the model, computes the largest step and records a few graphs. Then the real pool takes the memory
that is left, and all graphs are recorded over its pages.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from threading import TIMEOUT_MAX
from typing import Final

import torch

from components.wire.layout import of_shard
from components.wire.sampling import SamplingParams
from engine.attention.backend import AttentionBackend
from engine.attention.choose_attention import make_attention
from engine.attention.step_tables import StepLimits
from engine.compilation.device import DeviceForward, choose_device_forward
from engine.compilation.forward import EagerForward, Forward
from engine.config import EngineConfig, StepSize
from engine.device.memory import CudaMemory, DeviceMemory, MemoryUse, lack_of_memory
from engine.kv.count import asked_pages, count_offloaded, count_pages, count_staging
from engine.kv.offload_memory import PageCopies, allocate_offloaded, allocate_staging
from engine.kv.storage import TORCH_DTYPES, allocate_storage
from engine.model.load import LoadedModel
from engine.model.pooling import Pooling
from engine.model.probe import check_attention
from engine.model.progress import Progress, silent
from engine.ports import Phase
from engine.runner.device_model import DeviceModel
from engine.runner.step_inputs import inputs_of
from engine.runner.step_runner import StepFailed
from engine.runner.torch_runner import TorchRunner
from engine.scheduler.request import Chunk, Request, RequestState
from engine.sharding.group import of_all_ranks

log = logging.getLogger(__name__)

TRIAL_PAGES: Final = 2
TRIAL_GRAPHS: Final = 4  # recorded to learn what all take: the largest, and three that share its memory
# the largest state that a sampler keeps for a row
SAMPLING: Final = SamplingParams(max_tokens=1, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.1, logprobs=20)


@dataclass(frozen=True, slots=True)
class Pool:
    storage: torch.Tensor  # [num_pages, heads, layers, 2, page_size, head_dim]
    offloaded: torch.Tensor  # likewise, for evicted pages, in main memory
    staging: torch.Tensor  # with the heads of all ranks, for pages on their way to or from files
    attention: AttentionBackend
    max_context: int
    window: int = 0  # keys that any layer sees at most; 0: all


@dataclass(frozen=True, slots=True)
class Parts:
    pool: Pool
    model: DeviceModel


MakeForward = Callable[[LoadedModel, EngineConfig, AttentionBackend, Progress], Forward]


def make_pool(loaded: LoadedModel, config: EngineConfig, shared: int | None = None) -> Pool:
    """Allocate as many pages as the settings say, and test the attention. `shared`: as for `allocate_staging`.

    Raises: WrongSettings, UnsupportedModel, AttentionUnavailable.
    """
    pool = _pool(loaded, config, count_pages(config, loaded.layout), shared)
    return replace(pool, window=check_attention(loaded, pool.attention))


def _pool(loaded: LoadedModel, config: EngineConfig, num_pages: int, shared: int | None) -> Pool:
    layout = loaded.layout
    pool = _bare_pool(loaded, config, num_pages, num_pages * config.page_size)
    offloaded = allocate_offloaded(layout, count_offloaded(config, layout), loaded.device)
    staging = allocate_staging(layout, count_staging(config, layout), loaded.device, shared)
    return replace(pool, offloaded=offloaded, staging=staging)


def _bare_pool(loaded: LoadedModel, config: EngineConfig, num_pages: int, context: int) -> Pool:
    """A pool without pages outside of it. `context`: the longest that steps may have."""
    layout = loaded.layout
    storage = allocate_storage(layout, num_pages, loaded.device)
    max_context = min(loaded.max_positions, context, config.max_context or context)
    size = config.step_size(str(loaded.device))
    limits = StepLimits(size.requests, size.tokens, max_context)
    dtype = TORCH_DTYPES[config.model_dtype]
    attention = make_attention(config.attention, storage, layout, loaded.query_group, limits, dtype=dtype)
    return Pool(storage, storage[:0], storage[:0], attention, max_context)


def make_forward(loaded: LoadedModel, config: EngineConfig, attention: AttentionBackend, progress: Progress) -> Forward:
    """The forward on a device; on a CPU an eager one."""
    if loaded.device.type != "cuda":
        return EagerForward(loaded.module)
    if loaded.layout.shards > 1:  # ranks that stop waiting or recording at different times would wait for each other
        config = replace(config, compile_timeout_s=TIMEOUT_MAX)
    return choose_device_forward(loaded, config, attention, progress)


def make_model(loaded: LoadedModel, forward: Forward, pool: Pool) -> DeviceModel:
    heads = loaded.layout.heads
    pages = PageCopies(pool.storage, pool.offloaded, pool.staging[:, heads.start : heads.stop])
    return DeviceModel(loaded.device, forward, pool.attention, pages, loaded.adapters)


def make_parts(
    loaded: LoadedModel,
    config: EngineConfig,
    progress: Progress = silent,
    memory: DeviceMemory | None = None,
    make_forward: MakeForward = make_forward,
    *,
    shared: int | None = None,
) -> Parts:
    """Make them all. The ranks of an instance call it together, and get equally many pages.

    Args:
        shared: as for `allocate_staging`.
        memory: what is measured; default: the CUDA device, and nothing on a CPU.

    Raises: CannotServe, WrongSettings, UnsupportedModel, AttentionUnavailable.
    """
    if memory is None and loaded.device.type == "cuda":
        memory = CudaMemory(loaded.device)
    if memory is None:
        pool = make_pool(loaded, config, shared)
        return Parts(pool, make_model(loaded, make_forward(loaded, config, pool.attention, progress), pool))
    forward, use, window = _measured(loaded, config, progress, memory, make_forward)
    uses = _of_all_ranks(use, loaded)
    num_pages = asked_pages(config, loaded.layout) or _pages_left(uses, loaded, config)
    pool = replace(_pool(loaded, config, num_pages, shared), window=window)
    if isinstance(forward, DeviceForward):
        forward.record(pool.attention, progress)
    if loaded.layout.shard == 0:
        _report(uses, pool, memory, loaded)
    return Parts(pool, make_model(loaded, forward, pool))


def _measured(
    loaded: LoadedModel, config: EngineConfig, progress: Progress, memory: DeviceMemory, make_forward: MakeForward
) -> tuple[Forward, MemoryUse, int]:
    """Prepare the forward, measure it, and find the window. The trial's pages and graphs are free again afterwards."""
    weights = memory.measure().own
    context = min(loaded.max_positions, config.max_context or loaded.max_positions)
    trial = _bare_pool(loaded, config, TRIAL_PAGES, context)
    window = check_attention(loaded, trial.attention)
    forward = make_forward(loaded, config, trial.attention, progress)
    ready = memory.measure()
    use = MemoryUse(ready.total, ready.free, weights, max(0, ready.own - weights), 0, 0)
    graphs = _trial_graphs(forward, trial, memory) if isinstance(forward, DeviceForward) else 0
    before = memory.measure().own
    memory.start_peak()
    model = make_model(loaded, forward, trial)
    size = config.step_size(str(loaded.device))
    try:
        run_largest_step(model, size, context, loaded, draws=loaded.layout.shard == 0)
    except (torch.OutOfMemoryError, StepFailed) as exc:
        if isinstance(exc.__cause__ or exc, torch.OutOfMemoryError):
            kind = lack_of_memory(use.by_others(config.gpu_memory_utilization))
            raise kind(use.step_too_large(str(loaded.device), size, str(exc.__cause__ or exc))) from exc
        raise
    use = use.with_step(memory.peak() - before, graphs)
    if isinstance(forward, DeviceForward):
        forward.forget_graphs()
    del trial, model
    memory.measure()  # gives their memory back
    return forward, use, window


def _trial_graphs(forward: DeviceForward, trial: Pool, memory: DeviceMemory) -> int:
    """Estimate the bytes of all graphs from the first few. They share most memory, but each has some of its own.

    Only this process's memory is measured: else that of a worker that starts beside it would be multiplied, too. The
    estimate lacks the driver's memory for graphs; the memory that each share leaves free is for that. Over the real pool
    graphs also have memory for split contexts, less than a thousandth of the pool.
    """
    before = memory.measure().own
    recorded, _ = forward.record(trial.attention, silent, most=1)
    first = memory.measure().own
    recorded, wanted = forward.record(trial.attention, silent, most=TRIAL_GRAPHS)
    last = memory.measure().own
    each = max(0, last - first) / max(1, recorded - 1)
    return max(0, first - before) + round(each * max(0, wanted - 1))


def _of_all_ranks(use: MemoryUse, loaded: LoadedModel) -> list[MemoryUse]:
    if loaded.layout.shards == 1:
        return [use]
    return [MemoryUse(*numbers) for numbers in of_all_ranks(astuple(use), loaded.device)]


def _pages_left(uses: Sequence[MemoryUse], loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the pages of the rank with the least memory.

    Raises: WrongSettings, on each rank, if that is not even a request's; CannotServe, if other processes hold the rest.
    """
    layout, share = loaded.layout, config.gpu_memory_utilization
    page_bytes = [of_shard(layout, rank, layout.shards).page_bytes for rank in range(len(uses))]
    pages = [use.left(share) // each for use, each in zip(uses, page_bytes, strict=True)]
    least = min(pages)
    tokens = min(loaded.max_positions, config.max_context or config.step_size(str(loaded.device)).tokens)
    needed = layout.pages_for(tokens)
    if least < needed:
        rank = pages.index(least)
        which = f"{loaded.device}" if len(uses) == 1 else f"rank {rank}"
        bytes_needed = needed * page_bytes[rank]
        kind = lack_of_memory(uses[rank].by_others(share, bytes_needed))
        raise kind(f"too little memory on {which}: {uses[rank].shortage(bytes_needed, share)}")
    return least


def _report(uses: Sequence[MemoryUse], pool: Pool, memory: DeviceMemory, loaded: LoadedModel) -> None:
    pages = {"pages": len(pool.storage), "kv_gb": round(pool.storage.nbytes / 1e9, 2)}
    for rank, use in enumerate(uses):
        facts = {"device": str(loaded.device), **use.facts(), **pages}
        if rank == 0:
            facts["free_gb"] = round(memory.measure().free / 1e9, 2)
        else:
            facts["device"] = f"rank {rank}"
        log.info("the device's memory is divided", extra=facts)


def run_largest_step(model: DeviceModel, size: StepSize, max_context: int, loaded: LoadedModel, *, draws: bool) -> None:
    """Compute the step that needs the most memory, on page 0, and wait for its end. `draws`: not on a follower."""
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
