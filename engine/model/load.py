"""Load a model of transformers with our attention."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from components.wire.layout import KvLayout, of_shard
from engine.attention.latent import keep_latents, latent_size
from engine.config import EngineConfig
from engine.device.memory import fits_alone, lack_of_memory
from engine.errors import DeviceUnavailable, UnsupportedModel
from engine.kv.storage import TORCH_DTYPES
from engine.lora.adapters import Adapters, install_adapters
from engine.model.end_tokens import named_end
from engine.model.identity import random_identity, weights_identity
from engine.model.pooling import Pooling, read_pooling
from engine.model.progress import Progress
from engine.model.quantised import forget_quantisation, unpacker
from engine.model.resolve import is_random, model_dir, served_name
from engine.model.source import RANDOM_SEED, ModelSource, read_config
from engine.model.support import check_config, max_positions
from engine.sampling.bounds import end_tokens
from engine.sharding.cuts import NO_CUTS, cut_weights, join_sums, plan_cuts
from engine.sharding.heads import check_heads, query_heads


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: Any  # transformers', in eval mode
    layout: KvLayout  # of this rank
    device: torch.device
    vocab_size: int
    query_group: int  # query heads per key head, on this rank
    max_positions: int
    eos_token_ids: frozenset[int]
    adapters: Adapters = field(default_factory=Adapters)
    pooling: Pooling | None = None  # for an embedding model, whose `module` is a `Headless`


class Headless(torch.nn.Module):
    """A model without an output layer, whose `logits` are hidden states."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.config = base.config

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def forward(self, *, logits_to_keep: torch.Tensor | None = None, **inputs: Any) -> CausalLMOutput:
        """Return hidden states [1, K, size] of the tokens at `logits_to_keep` [K]; None: all."""
        hidden = self.base(**inputs).last_hidden_state
        return CausalLMOutput(logits=hidden if logits_to_keep is None else hidden[:, logits_to_keep])


def load_model(model: str, config: EngineConfig, state_dir: Path, progress: Progress, rank: int = 0) -> LoadedModel:
    """Find, check and load `model`, or a rank's part of it.

    Raises: ModelUnavailable, UnsupportedModel, DeviceUnavailable.
    """
    directory = model_dir(model, state_dir, progress)
    name = served_name(model)
    device = pick_device(config.device, rank)
    model_config = read_config(directory)
    check_config(name, model_config)
    unpack = unpacker(model_config)
    forget_quantisation(model_config)
    pooling = read_pooling(name, directory, matryoshka=config.matryoshka)
    if pooling is not None and config.lora:
        raise UnsupportedModel(f"{name} computes embeddings: LoRA adapters are for models that generate text")
    text = model_config.get_text_config()
    heads, size = text.num_attention_heads, config.tensor_parallel
    latent = latent_size(text)
    kv_heads = 1 if latent else getattr(text, "num_key_value_heads", None) or heads
    check_heads(name, heads, kv_heads, size)
    random = is_random(model) or config.load_format == "dummy"
    identity = (
        random_identity(name, directory, RANDOM_SEED, device.type) if random else weights_identity(name, directory)
    )
    layout = KvLayout(
        model=f"{identity}{config.model_suffix}",
        dtype=config.page_dtype,
        page_size=config.page_size,
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=latent or getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
    shard = of_shard(layout, rank, size)
    auto = AutoModelForCausalLM if pooling is None else AutoModel
    source = ModelSource(name, directory, model_config, auto, TORCH_DTYPES[config.model_dtype], unpack)
    skeleton = None if size == 1 and unpack is None else source.skeleton()
    cuts = NO_CUTS if skeleton is None or size == 1 else plan_cuts(name, skeleton, shard, heads)
    if random:
        progress("Making random weights", 0, 1)
        module = source.random(device)
        cut_weights(module, cuts, rank)
        progress("Making random weights", 1, 1)
    else:
        module = _moved(source.trained(skeleton, cuts, rank, progress), device)
    keep_latents(module)
    adapters = install_adapters(module, config.lora, cuts.linears) if pooling is None else Adapters()
    join_sums(module, cuts)
    if pooling is not None:
        module = Headless(module)
    elif rank > 0:
        module.set_output_embeddings(torch.nn.Identity())  # the leader alone reads logits
    limit = None if pooling is None else pooling.max_tokens
    return LoadedModel(
        module=module.eval(),
        layout=shard,
        device=device,
        vocab_size=text.vocab_size,
        query_group=len(query_heads(heads, shard)) // shard.num_heads,
        max_positions=max_positions(text) if limit is None else min(limit, max_positions(text)),
        eos_token_ids=end_tokens(named_end(directory, getattr(text, "eos_token_id", None)), text.vocab_size),
        adapters=adapters,
        pooling=pooling,
    )


def _moved(module: Any, device: torch.device) -> Any:
    """Raises: WrongSettings, if weights do not fit; CannotServe, if other processes hold the memory."""
    try:
        return module.to(device)
    except torch.OutOfMemoryError as exc:
        weights = sum(parameter.nbytes for parameter in module.parameters())
        free, total = torch.cuda.mem_get_info(device)
        raise lack_of_memory(fits_alone(weights, total))(
            f"too little memory on {device}: the weights take {weights / 1e9:.1f} GB, and of {total / 1e9:.1f} GB "
            f"{free / 1e9:.1f} GB were free after some of them. To do: divide the model over more devices by "
            "engine.tensor_parallel, or end other processes on this device"
        ) from exc


def pick_device(name: str, rank: int = 0) -> torch.device:
    """Return the device of `rank`, which has an index if it is CUDA. Ranks use devices from `name` on, or share a CPU.

    `auto` is the first CUDA device, else the CPU; `cuda` is torch's current one.

    Raises: DeviceUnavailable.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"device={name}: torch {torch.__version__} finds no CUDA device here; set device=cpu, or install its CUDA build "
            "and give this process a GPU"
        )
    index = (torch.cuda.current_device() if device.index is None else device.index) + rank
    if index >= torch.cuda.device_count():
        which = f"device={name}" if rank == 0 else f"device={name}, rank {rank} of tensor_parallel: cuda:{index}"
        raise DeviceUnavailable(f"{which}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)
