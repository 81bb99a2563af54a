"""Which rows or columns of a model's weights belong to a rank.

transformers' `base_model_tp_plan` names the layers. KV heads that do not suffice are replicated. Attention sinks are cut
like the query heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from components.wire.layout import KvLayout
from engine.errors import UnsupportedModel
from engine.sharding.group import Reduced

OUTPUTS: Final = "colwise"  # each rank has some of the outputs
INPUTS: Final = "rowwise"  # each rank has some of the inputs: the outputs are summed
WHOLE: Final = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params"}
)
# by model type: layers that transformers' plan leaves out
ADDED: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": OUTPUTS,
        "layers.*.self_attn.k_proj": OUTPUTS,
        "layers.*.self_attn.v_proj": OUTPUTS,
        "layers.*.self_attn.o_proj": INPUTS,
        "layers.*.self_attn.sinks": OUTPUTS,
    }
}
SINKS: Final = "sinks"  # transformers' name of the parameter, [heads]
KV_LAYERS: Final = ("k_proj", "v_proj")  # transformers' names


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a linear layer, or of attention sinks."""

    style: str  # OUTPUTS or INPUTS
    start: int
    length: int
    whole: int  # of all ranks

    @property
    def weight(self) -> tuple[slice, ...]:
        """Index of the part in the layer's weight, [outputs, inputs], or in the sinks."""
        part = slice(self.start, self.start + self.length)
        return (part,) if self.style == OUTPUTS else (slice(None), part)

    def bias(self, rank: int) -> tuple[slice, ...] | None:
        """Index of the part in the bias; None: this rank adds no bias, because another does."""
        if self.style == OUTPUTS:
            return self.weight
        return (slice(None),) if rank == 0 else None

    def whole_shape(self, part: torch.nn.Linear) -> tuple[int, int]:
        """(outputs, inputs) of the whole layer."""
        return (self.whole, part.in_features) if self.style == OUTPUTS else (part.out_features, self.whole)

    def of_change(self, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of a layer's LoRA matrices, [rank, inputs] and [outputs, rank]."""
        return (down, up[self.weight]) if self.style == OUTPUTS else (down[self.weight], up)


Cuts = Mapping[str, Cut]  # by the name of the layer or the sinks
NO_CUTS: Final[Cuts] = MappingProxyType({})  # of a whole model


def plan_cuts(name: str, module: Any, layout: KvLayout) -> dict[str, Cut]:
    """The cuts of a whole `module` for the shard of `layout`.

    Raises: UnsupportedModel.
    """
    config = module.config.get_text_config()
    styles = getattr(config, "base_model_tp_plan", None)
    if not styles:
        raise UnsupportedModel(f"tensor_parallel={layout.shards}: transformers has no plan to cut {name}")
    prefix = "" if module.base_model is module else f"{module.base_model_prefix}."
    styles = {**ADDED.get(config.model_type, {}), **styles}
    cuts: dict[str, Cut] = {}
    for path, layer in [*module.base_model.named_modules(), *module.base_model.named_parameters()]:
        style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None or style in WHOLE:
            continue
        is_linear = type(layer) is torch.nn.Linear and style in (OUTPUTS, INPUTS)
        if not is_linear and not (path.endswith(f".{SINKS}") and style == OUTPUTS):
            raise UnsupportedModel(
                f"tensor_parallel={layout.shards}: {name} cannot be cut: its layer {path} is {style}, "
                f"and only linear layers are cut, {OUTPUTS} or {INPUTS}"
            )
        whole = len(layer) if not is_linear else layer.out_features if style == OUTPUTS else layer.in_features
        cuts[prefix + path] = _cut(name, path, whole, style, layout)
    if not cuts:
        raise UnsupportedModel(f"tensor_parallel={layout.shards}: transformers' plan cuts no layer of {name}")
    return cuts


def _cut(name: str, path: str, whole: int, style: str, layout: KvLayout) -> Cut:
    if path.rpartition(".")[2] in KV_LAYERS:
        return Cut(style, layout.heads.start * layout.head_dim, layout.num_heads * layout.head_dim, whole)
    if whole % layout.shards:
        raise UnsupportedModel(
            f"tensor_parallel={layout.shards}: {name} cannot be cut so: {path} has {whole} columns or rows"
        )
    length = whole // layout.shards
    return Cut(style, layout.shard * length, length, whole)


def cut_weights(module: torch.nn.Module, cuts: Cuts, rank: int) -> None:
    """Leave each layer its part of the weights."""
    for name, cut in cuts.items():
        parent, _, leaf = name.rpartition(".")
        layer: Any = getattr(module.get_submodule(parent), leaf)
        if isinstance(layer, torch.nn.Parameter):
            setattr(module.get_submodule(parent), leaf, _part(layer, cut.weight))
            continue
        if cut.style == OUTPUTS:
            layer.out_features = cut.length
        else:
            layer.in_features = cut.length
        layer.weight = _part(layer.weight, cut.weight)
        if layer.bias is not None:
            bias = cut.bias(rank)
            layer.bias = None if bias is None else _part(layer.bias, bias)


def _part(whole: torch.Tensor, index: tuple[slice, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(whole.detach()[index].clone(), requires_grad=False)


def join_sums(module: torch.nn.Module, cuts: Cuts) -> None:
    """Sum the outputs of layers whose inputs are cut, after their adapters."""
    for name, cut in cuts.items():
        if cut.style == INPUTS:
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, Reduced(module.get_submodule(name)))
