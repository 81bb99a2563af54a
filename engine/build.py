"""Build an engine for a model."""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from components.wire.layout import KvRegion, RankMemory
from engine.attention.choose_attention import prepare_attention
from engine.attention.cpu import CpuAttention
from engine.compilation.forward import EagerForward, Forward
from engine.compilation.packages import CompiledWhenReady, choose_forward
from engine.config import FOLLOWER, EngineConfig
from engine.core.engine_core import PACK_TOKENS, EngineCore
from engine.cpu.cpu_time import cores_for_a_while, own_cores, usable_cores
from engine.cpu.machine import set_compile_caches
from engine.cpu.shared_cores import SharedCores
from engine.cpu.step_threads import StepThreads
from engine.cpu.thread_limit import ThreadLimit
from engine.device.memory import DeviceMemory
from engine.kernels.linear import pack_linears, sums_in_one_order
from engine.kernels.native_library import kernels_are_loaded
from engine.kv.offload_memory import byte_views
from engine.kv.page_store import open_staging
from engine.lora.adapters import pack_adapters
from engine.model.load import LoadedModel, load_model, pick_device
from engine.model.progress import Progress, silent
from engine.parallel.followers import Followers, LedModel
from engine.parts import Pool, make_model, make_parts, make_pool
from engine.runner.device_model import StepModel
from engine.runner.torch_runner import TorchRunner
from engine.scheduler.prompt_lookup import PromptLookup
from engine.sharding.experts import has_experts

log = logging.getLogger(__name__)

CPU_PACK_TOKENS: Final = 128  # enough to keep a CPU busy
EXACT_RANKS: Final = 2  # gloo adds the numbers of more ranks in an order that depends on their place in the tensor
DRAFTS: Final = 7  # of a request in one step, where no number is set
BINDINGS: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def build_engine(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent, follower: str = FOLLOWER
) -> EngineCore:
    """Load `model`, on the thread that will step the engine. `follower` is the module of the other ranks.

    Raises: ModelUnavailable, UnsupportedModel, AttentionUnavailable, RankLost.
    """
    if config.tensor_parallel > 1:
        return _build_with_followers(model, config, state_dir, progress, follower)
    loaded = prepare_model(model, config, state_dir, progress)
    if loaded.device.type != "cuda":
        forward = choose_forward(model, loaded, config, state_dir, progress)
        _keep_threads_apart()
        return assemble(loaded, config, forward, cores=_shared_cores(config, forward))
    parts = make_parts(loaded, config, progress)
    return assemble(loaded, config, parts.model.forward, parts.pool)


def _build_with_followers(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress, follower: str
) -> EngineCore:
    pick_device(config.device, config.tensor_parallel - 1)  # before any process loads
    followers = Followers(model, config, state_dir, follower)
    try:
        loaded = prepare_model(model, config, state_dir, progress)
        followers.join(loaded.device)
        return assemble_led(loaded, config, followers, progress)
    except BaseException:
        followers.close()
        raise


def prepare_model(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent, rank: int = 0
) -> LoadedModel:
    """Load a rank's part of `model`, all of it by default, with the kernels that it needs."""
    share = max(1, cores_for_a_while() // config.tensor_parallel)
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), share))
    if rank == 0:
        log.info("loading weights", extra={"model": model})
    loaded = load_model(model, config, state_dir, progress, rank)
    if rank == 0:
        log.info("warming up", extra={"device": str(loaded.device)})
    prepare_attention(config.attention, loaded.device, state_dir)
    pack_linears(loaded.module)
    loaded = replace(loaded, adapters=pack_adapters(loaded.adapters))
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)  # kernels are launched on this thread's device
        set_compile_caches(state_dir)
    return loaded


def _shared_cores(config: EngineConfig, forward: Forward) -> SharedCores | None:
    """Leave one core to a compiler, which would not finish otherwise under load."""
    if config.shared_cores is None:
        return None
    cores, threads = cores_for_a_while(), torch.get_num_threads()
    spared = forward.is_compiling if isinstance(forward, CompiledWhenReady) else lambda: 0
    try:
        return SharedCores(config.shared_cores, cores, threads, spared)
    except OSError as exc:
        log.warning("no cores are borrowed from idle workers", extra={"reason": str(exc)})
        return None


def _keep_threads_apart() -> None:
    """Give each thread of a step a core, while there are as many of both and the user has bound none.

    Not on the main thread: a process that it starts later would inherit its one core.
    """
    if threading.current_thread() is threading.main_thread() or not kernels_are_loaded():
        return
    if not any(name in os.environ for name in BINDINGS):
        torch.ops.kvmesh.keep_apart(torch.tensor(own_cores()))


def _adapt_threads(cores: SharedCores) -> None:
    """Let the C++ attention change the threads between layers."""
    cells = cores.cells()
    if cells is not None and torch.ops.kvmesh.follow_threads(*(torch.frombuffer(c, dtype=torch.int64) for c in cells)):
        cores.adapt()


def assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    forward: Forward | None = None,
    pool: Pool | None = None,
    cores: SharedCores | None = None,
) -> EngineCore:
    """Create an engine, by default eager and with its own pool.

    Raises: UnsupportedModel, AttentionUnavailable.
    """
    pool = pool or make_pool(loaded, config)
    if cores is not None and isinstance(pool.attention, CpuAttention):
        _adapt_threads(cores)
    # under a quota of 1.5 cores a second thread helps prompts, but not decodes
    is_fixed = config.threads is not None and cores is None
    threads = cores.cores if cores is not None else torch.get_num_threads()
    limit = ThreadLimit(threads, threads if is_fixed else usable_cores())
    model = make_model(loaded, forward or EagerForward(loaded.module), pool)
    return _engine(loaded, config, pool, model, StepThreads(limit, cores))


def assemble_led(
    loaded: LoadedModel,
    config: EngineConfig,
    followers: Followers,
    progress: Progress = silent,
    memory: DeviceMemory | None = None,
) -> EngineCore:
    """Create an engine whose model is on several ranks, each with its own pool. `memory`: as for `make_parts`.

    Raises: WrongSettings, UnsupportedModel, AttentionUnavailable, RankLost.
    """
    number = followers.make_models(config)
    with followers.together():
        parts = make_parts(loaded, config, progress, memory, shared=followers.staging)
    ranks = followers.rank_memories()
    threads = None
    # ranks must route alike, and a router's last bits depend on the number of threads
    if not has_experts(loaded.module):
        threads = StepThreads(ThreadLimit(torch.get_num_threads(), torch.get_num_threads()))
    model = LedModel(parts.model, followers, number)
    return _engine(loaded, config, parts.pool, model, threads, ranks)


def _engine(  # noqa: PLR0917
    loaded: LoadedModel,
    config: EngineConfig,
    pool: Pool,
    model: StepModel,
    threads: StepThreads | None,
    ranks: Sequence[RankMemory] = (),
) -> EngineCore:
    on_cpu = loaded.device.type == "cpu"
    storage = pool.storage
    drafts = _num_drafts(loaded, config, pool)
    if pool.window:
        log.info("pages before the sliding window of all layers are released", extra={"window": pool.window})
    if len(pool.offloaded):
        log.info("evicted pages are kept in main memory", extra={"pages": len(pool.offloaded)})
    return EngineCore(
        runner=TorchRunner(model, pooling=loaded.pooling),
        threads=threads if on_cpu else None,
        config=config,
        region=KvRegion(storage.data_ptr(), len(storage), loaded.layout, str(storage.device), ranks),
        max_context=pool.max_context,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        adapters=loaded.adapters.identities,
        pooling=loaded.pooling,
        pack_tokens=CPU_PACK_TOKENS if on_cpu else PACK_TOKENS,
        window=pool.window,
        num_offloaded=len(pool.offloaded),
        staging=open_staging(config, loaded.layout, byte_views(pool.staging)),
        make_drafter=partial(PromptLookup, drafts) if drafts else None,
    )


def _num_drafts(loaded: LoadedModel, config: EngineConfig, pool: Pool) -> int:
    """Return how many drafts a request may have in a step: by default none where they could change a bit of an answer."""
    if loaded.pooling is not None:
        return 0
    if config.speculative_tokens is not None:
        return config.speculative_tokens
    if config.pipeline == "on" or not isinstance(pool.attention, CpuAttention):
        return 0
    if config.tensor_parallel > EXACT_RANKS:
        return 0
    return DRAFTS if sums_in_one_order(loaded.module) and loaded.adapters.are_packed() else 0
