"""Load a model of transformers with our attention."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging as transformers_logging

from components.wire.layout import KvLayout, of_shard
from engine.attention.backend import IMPLEMENTATION
from engine.config import EngineConfig
from engine.device.memory import fits_alone, lack_of_memory
from engine.errors import DeviceUnavailable, ModelUnavailable, UnsupportedModel
from engine.kv.storage import TORCH_DTYPES
from engine.lora.adapters import Adapters, install_adapters
from engine.model.end_tokens import named_end
from engine.model.identity import random_identity, weights_identity
from engine.model.pooling import Pooling, read_pooling
from engine.model.progress import Progress, unless_quick
from engine.model.quantised import forget, unpacker
from engine.model.resolve import is_random, model_dir, served_name
from engine.model.support import check_config, check_stored, check_unexpected, max_positions
from engine.sampling.bounds import end_tokens
from engine.sharding.cuts import NO_CUTS, cut_weights, join_sums, plan_cuts
from engine.sharding.heads import check_heads, query_heads
from engine.sharding.read_part import INDEX, read_part, weight_files

RANDOM_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: Any  # transformers' module, in eval mode
    layout: KvLayout  # of this rank
    device: torch.device
    vocab_size: int
    query_group: int  # query heads per key head, on this rank
    max_positions: int
    eos_token_ids: frozenset[int]
    adapters: Adapters = field(default_factory=Adapters)
    pooling: Pooling | None = None  # for an embedding model, whose `module` is a `Headless`


class Headless(torch.nn.Module):
    """A model without an output layer: its `logits` are hidden states."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.config = base.config

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def forward(self, *, logits_to_keep: torch.Tensor | None = None, **inputs: Any) -> CausalLMOutput:
        """Return as `logits` hidden states [1, K, size] of the tokens at `logits_to_keep` [K]; None: all."""
        hidden = self.base(**inputs).last_hidden_state
        return CausalLMOutput(logits=hidden if logits_to_keep is None else hidden[:, logits_to_keep])


def load_model(model: str, config: EngineConfig, state_dir: Path, progress: Progress, rank: int = 0) -> LoadedModel:
    """Find, check and load `model`, or a rank's part of it.

    Raises: ModelUnavailable, UnsupportedModel, DeviceUnavailable.
    """
    directory = model_dir(model, state_dir, progress)
    name = served_name(model)
    device = pick_device(config.device, rank)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    model_config = _read_config(directory)
    check_config(name, model_config)
    unpack = unpacker(model_config)
    forget(model_config)
    pooling = read_pooling(name, directory, matryoshka=config.matryoshka)
    if pooling is not None and config.lora:
        raise UnsupportedModel(f"{name} computes embeddings: LoRA adapters are for models that generate text")
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = config.tensor_parallel
    check_heads(name, heads, kv_heads, size)
    auto = AutoModelForCausalLM if pooling is None else AutoModel
    random = is_random(model) or config.load_format == "dummy"
    layout = KvLayout(
        model=random_identity(name, directory, RANDOM_SEED, device.type)
        if random
        else weights_identity(name, directory),
        dtype=dtype,
        page_size=config.page_size,
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
    shard = of_shard(layout, rank, size)
    with _built(name, directory):
        skeleton = None if size == 1 and unpack is None else _skeleton(auto, model_config)
    cuts = NO_CUTS if skeleton is None or size == 1 else plan_cuts(name, skeleton, shard, heads)
    if random:
        progress("Making random weights", 0, 1)
        with _built(name, directory):
            module = _random_model(auto, model_config, TORCH_DTYPES[dtype], device)
        cut_weights(module, cuts, rank)
        progress("Making random weights", 1, 1)
    else:
        whole = partial(_whole_model, auto, directory, TORCH_DTYPES[dtype])
        part = partial(read_part, directory, skeleton, TORCH_DTYPES[dtype], cuts, rank, unpack or dict)
        _check_files(name, directory, unpack is not None)
        module = _trained_model(name, directory, whole if skeleton is None else part, device, progress)
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


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        # The first paragraph is the cause; the rest explains how to update transformers.
        cause = " ".join(str(exc).partition("\n\n")[0].split())
        raise ModelUnavailable(f"the configuration in {directory} cannot be read: {cause}") from exc


@contextmanager
def _built(name: str, directory: Path) -> Iterator[None]:
    """Turn transformers' errors while it builds a model into ModelUnavailable."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as exc:
        raise ModelUnavailable(
            f"transformers {transformers.__version__} cannot build {name} from the files in {directory} "
            f"({type(exc).__name__}: {exc}). Check them, or install the version of transformers that the model needs"
        ) from exc


def _skeleton(auto: Any, model_config: Any) -> Any:
    """Return the whole model without allocating its weights."""
    with torch.device("meta"):
        return auto.from_config(model_config, attn_implementation=IMPLEMENTATION)


def _check_files(name: str, directory: Path, unpacked: bool) -> None:
    if not any(directory.glob("*.safetensors")):
        raise ModelUnavailable(f"{directory} has no *.safetensors; for random weights use load_format=dummy")
    check_stored(name, [path for path in _weight_files(directory) if path.is_file()], unpacked)


def _trained_model(
    name: str,
    directory: Path,
    read: Callable[[], tuple[Any, Mapping[str, Any]]],
    device: torch.device,
    progress: Progress,
) -> Any:
    """Load trained weights. `read` returns the result of `from_pretrained(output_loading_info=True)`."""
    try:
        with _reported_bars("Loading weights", progress), _built(name, directory):
            module, report = read()
    except (OSError, SafetensorError) as exc:
        raise ModelUnavailable(f"the weights in {directory} cannot be read: {exc}") from exc
    if wrong := sorted(report["mismatched_keys"]):
        tensor, stored, wanted = wrong[0]
        raise ModelUnavailable(
            f"the weights in {directory} do not fit its config.json: {tensor} is {tuple(stored)}, which should be "
            f"{tuple(wanted)}"
        )
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
        raise ModelUnavailable(f"the weights in {directory} lack {len(missing)} tensors, among them {missing[0]}")
    check_unexpected(name, module, report["unexpected_keys"])
    return _moved(module, device)


def _weight_files(directory: Path) -> list[Path]:
    try:
        return weight_files(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelUnavailable(f"{directory / INDEX} cannot be read: {exc}") from exc


def _moved(module: Any, device: torch.device) -> Any:
    """Move weights to `device`. Raises: WrongSettings, if they do not fit; CannotServe, if other processes hold the memory."""
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


def _whole_model(auto: Any, directory: Path, dtype: torch.dtype) -> Any:
    return auto.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # the caller refuses them
        output_loading_info=True,
    )


def _random_model(auto: Any, model_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Create random weights, the same in every process. The caller's random state does not change."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(RANDOM_SEED)
        return auto.from_config(model_config, dtype=dtype, attn_implementation=IMPLEMENTATION)


@contextmanager
def _reported_bars(task: str, progress: Progress) -> Iterator[None]:
    quiet = unless_quick(progress)

    def make(_factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Bar":
        return _Bar(task, quiet, args[0] if args else (), kwargs.get("total"))

    previous = transformers_logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


class _Bar:
    """The part of tqdm that transformers uses while loading."""

    def __init__(self, task: str, progress: Progress, iterable: Iterable[Any], total: int | None) -> None:
        self._task = task
        self._progress = progress
        self._items = list(iterable)
        self._total = len(self._items) or total or 0
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        self._done += n
        self._progress(self._task, self._done, self._total)

    def close(self) -> None:
        pass


def pick_device(name: str, rank: int = 0) -> torch.device:
    """Choose a device: `auto` is the first CUDA device, else the CPU; `cuda` is torch's current one.

    Later ranks use the devices after it; on a CPU they share it.

    Returns: the device; a CUDA device has an index.
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
