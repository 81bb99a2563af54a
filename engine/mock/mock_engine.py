"""Builds the mock engine for `mock` or `mock:<model>`."""

from math import isfinite
from pathlib import Path
from typing import Any

from components.wire.layout import KvLayout, of_shard
from engine.config import EngineConfig
from engine.core.engine_core import PACK_TOKENS, EngineCore
from engine.kv.count import count_offloaded, count_pages, count_staging
from engine.kv.page_store import open_staging
from engine.mock.marked_pages import MARKS, MarkedPages
from engine.mock.mock_runner import MockRunner
from engine.model.mock_model import LETTERS, MOCK
from engine.model.model_files import CONFIG_FILE, read_json, read_size
from engine.model.pooling import read_pooling
from engine.model.progress import Progress, silent
from engine.model.resolve import model_dir, served_name
from engine.parallel.rank_processes import RankProcesses
from engine.sampling.bounds import end_tokens
from engine.sharding.heads import check_heads


def build_engine(
    model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent, follower: str = ""
) -> EngineCore:
    """Build from a model's configuration, without torch or weights.

    `follower` is the module of other ranks' processes; without one, their pages are in this process.

    Raises: ModelUnavailable, UnsupportedModel, RankLost.
    """
    directory = model_dir(model, state_dir, progress)
    file = directory / CONFIG_FILE
    described = read_json(file)
    described = described.get("text_config", described)  # for a multimodal model
    pooling = read_pooling(served_name(model), directory, matryoshka=config.matryoshka)
    layout = _layout(file, described, served_name(model), config)
    num_pages = count_pages(config, layout)
    num_offloaded = count_offloaded(config, layout)
    shared = config.tensor_parallel > 1 and bool(follower)
    pages = MarkedPages(layout, num_pages, num_offloaded, count_staging(config, layout), shared=shared)
    staging = open_staging(config, layout, pages.slots)
    processes, region = None, pages.region()
    if pages.descriptor is not None:
        processes = RankProcesses(model, config, state_dir, follower, memory=pages.descriptor)
        try:
            region = pages.region(processes.rank_memories())
        except BaseException:
            processes.close()
            raise
    vocab_size = read_size(file, described, "vocab_size")
    eos_token_ids = end_tokens(described.get("eos_token_id"), vocab_size)
    alphabet = LETTERS if model == MOCK else [i for i in range(vocab_size) if i not in eos_token_ids]
    limits = [num_pages * config.page_size, config.max_context, None if pooling is None else pooling.max_tokens]
    if any(described.get(key) is not None for key in ("max_position_embeddings", "n_positions")):
        limits.append(read_size(file, described, "max_position_embeddings"))
    return EngineCore(
        runner=MockRunner(
            pages,
            config.mock,
            alphabet,
            min(eos_token_ids, default=None),
            config.lora,
            vocab_size=vocab_size,
            pooling=pooling,
            processes=processes,
        ),
        config=config,
        region=region,
        max_context=min(limit for limit in limits if limit is not None),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        adapters=config.lora,  # identified by directory name
        pooling=pooling,
        # without step times, any number of prompts may share a step
        pack_tokens=PACK_TOKENS if isfinite(config.mock.speedup) else config.step_size(region.device).tokens,
        window=config.mock.window or 0,
        num_offloaded=num_offloaded,
        staging=staging,
    )


def _layout(file: Path, described: dict[str, Any], name: str, config: EngineConfig) -> KvLayout:
    heads = read_size(file, described, "num_attention_heads")
    mock = config.mock
    kv_heads, head_dim = _heads(file, described, heads)
    whole = KvLayout(
        model=f"{name}, marks {MARKS}",  # not the model's own name, because its KV is not compatible
        dtype=config.page_dtype,
        page_size=config.page_size,
        layers=mock.layers or read_size(file, described, "num_hidden_layers"),
        kv_heads=mock.kv_heads or kv_heads,
        head_dim=mock.head_dim or head_dim,
    )
    size = config.tensor_parallel
    # a configured number of KV heads has a matching number of query heads
    check_heads(name, whole.kv_heads * size if mock.kv_heads else heads, whole.kv_heads, size)
    return of_shard(whole, 0, size)


def _heads(file: Path, described: dict[str, Any], heads: int) -> tuple[int, int]:
    """Return the number and the size of a model's KV heads. A model with MLA has one, of latents."""
    if described.get("kv_lora_rank"):
        return 1, read_size(file, described, "kv_lora_rank") + read_size(file, described, "qk_rope_head_dim")
    head_dim = described.get("head_dim") or read_size(file, described, "hidden_size") // heads
    return int(described.get("num_key_value_heads") or heads), int(head_dim)
