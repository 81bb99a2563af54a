"""A model's name to an engine that answers: the parts put together."""

from pathlib import Path

import torch

from engine.attention.choose import make_attention, prepare_attention
from engine.compilation.forward import EagerForward, Forward
from engine.compilation.packages import choose_forward
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kernels.linear import pack_linears
from engine.kv.count import count_pages
from engine.kv.storage import allocate_storage
from engine.model.load import LoadedModel, load_model
from engine.model.probe import check_attention
from engine.model.progress import Progress, silent
from engine.ports import KvRegion
from engine.runner import TorchRunner


def build_engine(model: str, config: EngineConfig, state_dir: Path, progress: Progress = silent) -> EngineCore:
    """Load `model` and give it a page pool. To be called on the thread that will step the engine.

    Raises: ModelUnavailable or UnsupportedModel, naming the model; BackendUnavailable, naming what is missing.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(model, config, state_dir, progress)
    prepare_attention(config.attention, loaded.device, state_dir)
    pack_linears(loaded.module)
    return assemble(loaded, config, choose_forward(model, loaded, config, state_dir, progress))


def assemble(loaded: LoadedModel, config: EngineConfig, forward: Forward | None = None) -> EngineCore:
    """An engine over `loaded`, with a page pool of its own; eager, unless told how else.

    Raises: UnsupportedModel, BackendUnavailable.
    """
    num_pages = count_pages(config, loaded.layout)
    storage = allocate_storage(loaded.layout, num_pages, loaded.device)
    attention = make_attention(config.attention, storage, loaded.layout, loaded.query_group)
    check_attention(loaded, attention)
    pool_tokens = num_pages * config.page_size
    return EngineCore(
        runner=TorchRunner(loaded.device, forward or EagerForward(loaded.module), attention, storage, loaded.adapters),
        config=config,
        region=KvRegion(storage.data_ptr(), num_pages, loaded.layout, str(storage.device)),
        max_context=min(loaded.max_positions, pool_tokens, config.max_context or pool_tokens),
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        adapters=loaded.adapters.identities,
    )
