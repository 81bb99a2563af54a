"""Adapters from PEFT's directories, which the model's linear layers apply to rows of a step."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import linear, pad

from engine.device.copies import to_device
from engine.device.huge_pages import HugeMemory
from engine.errors import ModelUnavailable, UnsupportedModel
from engine.kernels.linear import PANEL, can_pack, pack
from engine.kernels.operators import define_operator
from engine.lora.adapter_config import ADAPTER_WEIGHTS, AdapterConfig, adapter_identity, read_adapter_config
from engine.sharding.cuts import Cut

EXPERTS: Final = ".experts."  # part of transformers' names
TENSOR: Final = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one layer by one adapter: up (down x).

    Source: LoRA, Hu et al. 2021, arXiv:2106.09685.
    """

    down: torch.Tensor  # [rank, in], PEFT's lora_A
    up: torch.Tensor  # [out, rank], PEFT's lora_B times the scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(linear(x, self.down), self.up)


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """A packed `LowRank`, whose rank is padded with zeros to a multiple of PANEL."""

    down: torch.Tensor
    up: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        narrow = torch.ops.kvmesh.linear(x.contiguous(), self.down)
        changed: torch.Tensor = torch.ops.kvmesh.linear(narrow, self.up)
        return changed


Change = LowRank | PackedLowRank


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: slice | torch.Tensor  # int64 [N], or a slice if the rows are consecutive
    changes: Sequence[Change | None]  # by site


_groups: ContextVar[Sequence[RowGroup]] = ContextVar("kvmesh_lora", default=())


def any_adapted() -> bool:
    return bool(_groups.get())


class AdaptedLinear(torch.nn.Module):
    """A linear layer that applies the adapter of its request, if any, to each row of a step.

    Row groups are set per thread, outside the forward, so one compiled forward serves all steps. A row's bits do not depend
    on other rows' adapters. In an adapted MLP, gate and up are two products, so in bfloat16 its bits differ from those of
    `PackedGate`, which fuses them.
    """

    def __init__(self, plain: torch.nn.Linear, site: int) -> None:
        """`site`: index of the layer in an adapter's changes."""
        super().__init__()
        self.plain = plain
        self._site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(x)
        if torch.compiler.is_compiling():
            torch.ops.kvmesh.adapt(y, x, self._site)
        else:
            _adapt(y, x, self._site)
        return y


def _adapt(y: torch.Tensor, x: torch.Tensor, site: int) -> None:
    for group in _groups.get():
        change = group.changes[site]
        if change is None:
            continue
        flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        flat_y[group.rows] += change(flat_x[group.rows])  # rounded in the same order for slices and for indices


define_operator("adapt(Tensor(a!) y, Tensor x, int site) -> ()", _adapt, lambda _y, _x, _site: None)


@dataclass(frozen=True, slots=True)
class Adapters:
    identities: Mapping[str, str] = field(default_factory=dict)  # by name
    layers: tuple[str, ...] = ()  # by site
    changes: Mapping[str, Sequence[Change | None]] = field(default_factory=dict, repr=False)  # by site
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def are_packed(self) -> bool:
        return not any(isinstance(change, LowRank) for by_site in self.changes.values() for change in by_site)

    @contextmanager
    def of_rows(self, runs: Sequence[tuple[str, int]]) -> Iterator[None]:
        """Apply adapters to a step's rows on this thread. `runs`: (a name of `identities` or "", number of rows) in order."""
        rows: dict[str, list[int]] = {}
        start = 0
        for name, count in runs:
            if name:
                rows.setdefault(name, []).extend(range(start, start + count))
            start += count
        token = _groups.set([RowGroup(self._select(taken), self.changes[name]) for name, taken in rows.items()])
        try:
            yield
        finally:
            _groups.reset(token)

    def _select(self, rows: list[int]) -> slice | torch.Tensor:
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return to_device(rows, self.device, torch.int64)


def install_adapters(
    module: Any, directories: Mapping[str, str], cuts: Mapping[str, Cut] = MappingProxyType({})
) -> Adapters:
    """Read the adapters and replace the linear layers that they change.

    Args:
        module: transformers' model, changed in place; layers keep their parameters and names.
        directories: by adapter name; each contains adapter_config.json and adapter_model.safetensors.
        cuts: cuts of the layers of which `module` has only a part, by name.
    Raises: ModelUnavailable, if an adapter cannot be read; UnsupportedModel, if it does not fit the model or is not
    supported.
    """
    linears = _adaptable(module)
    read = {name: _read(name, Path(given).expanduser(), linears, cuts) for name, given in directories.items()}
    layers = tuple(layer for layer in linears if any(layer in changes for changes in read.values()))
    for site, layer in enumerate(layers):
        parent, _, leaf = layer.rpartition(".")
        setattr(module.get_submodule(parent), leaf, AdaptedLinear(linears[layer], site))
    return Adapters(
        identities={name: adapter_identity(Path(given).expanduser()) for name, given in directories.items()},
        layers=layers,
        changes={name: [changes.get(layer) for layer in layers] for name, changes in read.items()},
        device=module.device,
    )


def pack_adapters(adapters: Adapters) -> Adapters:
    """Pack changes in bfloat16 on a CPU, because the bits of torch's products depend on the number of rows.

    Changes stay as they are without AVX2, or for sizes that the kernels do not support.
    """
    if not can_pack():
        return adapters
    memory = HugeMemory()
    changes = {name: [_packed(change, memory) for change in by_site] for name, by_site in adapters.changes.items()}
    return replace(adapters, changes=changes)


def _packed(change: Change | None, memory: HugeMemory) -> Change | None:
    if not isinstance(change, LowRank):
        return change
    down, up = change.down, change.up
    if down.dtype is not torch.bfloat16 or down.device.type != "cpu" or down.shape[1] % 2 or len(up) % PANEL:
        return change
    missing = -len(down) % PANEL
    return PackedLowRank(pack(pad(down, (0, 0, 0, missing)), memory), pack(pad(up, (0, missing)), memory))


def _adaptable(module: Any) -> dict[str, torch.nn.Linear]:
    """Leave out layers that get only some rows: experts and the output layer."""
    head = module.get_output_embeddings()
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear and layer is not head and EXPERTS not in name
    }


def _read(
    name: str, directory: Path, linears: Mapping[str, torch.nn.Linear], cuts: Mapping[str, Cut]
) -> dict[str, LowRank]:
    config = read_adapter_config(name, directory)
    pairs = _pairs(name, directory)
    unknown = [layer for layer in pairs if layer not in linears]
    missing = [] if config.some_layers else [layer for layer in linears if config.names(layer) and layer not in pairs]
    if experts := next((layer for layer in unknown if EXPERTS in layer), None):
        raise UnsupportedModel(
            f"LoRA adapter {name!r} is not supported: it changes {experts}, and experts cannot be adapted. Train one "
            "for other layers (target_modules)"
        )
    if unknown or missing or not pairs:
        what = f"it changes {unknown[0]}" if unknown else f"it has no weights for {(missing or ['any layer'])[0]}"
        raise UnsupportedModel(
            f"LoRA adapter {name!r} is not supported: {what}. This model has {len(linears)} linear layers that can be "
            f"adapted, such as {next(iter(linears), 'none')}. Was the adapter trained on another model?"
        )
    return {
        layer: _change(name, config, layer, linears[layer], *pair, cuts.get(layer)) for layer, pair in pairs.items()
    }


def _pairs(name: str, directory: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    path = directory / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ModelUnavailable(f"LoRA adapter {name!r}: {path} cannot be read: {exc}") from exc
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = TENSOR.fullmatch(key)
        if found is None:
            raise UnsupportedModel(f"LoRA adapter {name!r} is not supported: {key} is not a change of a linear layer")
        parts.setdefault(found["layer"], {})[found["part"]] = tensor
    for layer, halves in parts.items():
        if len(halves) < 2:
            raise ModelUnavailable(f"LoRA adapter {name!r}: {path} has only one of the two matrices of {layer}")
    return {layer: (halves["A"], halves["B"]) for layer, halves in parts.items()}


def _change(  # noqa: PLR0917 - first the layer's values, then the file's
    name: str,
    config: AdapterConfig,
    layer: str,
    plain: torch.nn.Linear,
    down: torch.Tensor,
    up: torch.Tensor,
    cut: Cut | None,
) -> LowRank:
    rank = config.rank_of(layer)
    outputs, inputs = (plain.out_features, plain.in_features) if cut is None else cut.shape
    wanted = ((rank, inputs), (outputs, rank))
    if (tuple(down.shape), tuple(up.shape)) != wanted:
        raise UnsupportedModel(
            f"LoRA adapter {name!r} does not fit this model: the matrices of {layer} are {tuple(down.shape)} and "
            f"{tuple(up.shape)}, which should be {wanted[0]} and {wanted[1]}"
        )
    if cut is not None:
        down, up = cut.of_change(down, up)
    weight = plain.weight
    scaled = up.float() * config.scale_of(layer)
    return LowRank(down.to(weight.device, weight.dtype), scaled.to(weight.device, weight.dtype))
