"""Which part of a model's weights each rank has, by transformers' `base_model_tp_plan` and `base_model_ep_plan`.

If there are fewer KV heads than ranks, they are replicated. Attention sinks are cut like the query heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from components.wire.layout import KvLayout
from engine.attention.latent import latent_size
from engine.errors import UnsupportedModel
from engine.sharding.experts import WHOLE_EXPERTS, ExpertCut, ReducedExperts, cut_experts, plan_experts
from engine.sharding.group import Reduced
from engine.sharding.heads import query_heads
from engine.sharding.part import Part, packed, share

# names of styles in transformers
OUTPUTS: Final = "colwise"
INPUTS: Final = "rowwise"  # the outputs of all ranks are summed
EXPERTS: Final = "moe_tp_experts"
WHOLE: Final = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
        "embedding_colwise",
        "local_params",
        "mla_kv_a_proj",
    }
)
# transformers gathers the outputs, because modules split them
FUSED_OUTPUTS: Final = "colwise_gather_output"
FUSED_INPUTS: Final = "rowwise_split_input"
# by model type: styles that transformers' plan lacks
ADDED: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": OUTPUTS,
        "layers.*.self_attn.k_proj": OUTPUTS,
        "layers.*.self_attn.v_proj": OUTPUTS,
        "layers.*.self_attn.o_proj": INPUTS,
        "layers.*.self_attn.sinks": OUTPUTS,
    }
}
# styles of attention on latents, which transformers' plans leave whole
OF_LATENTS: Final[Mapping[str, str]] = {
    "layers.*.self_attn.q_proj": OUTPUTS,
    "layers.*.self_attn.q_b_proj": OUTPUTS,
    "layers.*.self_attn.kv_b_proj": OUTPUTS,
    "layers.*.self_attn.o_proj": INPUTS,
}
# names in transformers
SINKS: Final = "sinks"  # [heads]
KV_LAYERS: Final = ("k_proj", "v_proj")
FUSED_QKV: Final = "qkv_proj"
FUSED_BY_HEAD: Final = "query_key_value"  # queries, keys and values of one head, then of the next
FUSED_GATE: Final = "gate_up_proj"
FUSED: Final = (FUSED_QKV, FUSED_GATE)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a linear layer."""

    weight: Part  # of the outputs or inputs
    shape: tuple[int, int]  # of the whole layer: (outputs, inputs)
    heads: tuple[int, int] | None = None  # query and KV heads, for a module that splits its outputs by them

    @property
    def is_summed(self) -> bool:
        return self.weight.dim == 1

    def bias(self, rank: int) -> Part | None:
        """Return None if another rank adds the bias."""
        if not self.is_summed:
            return self.weight
        outputs = self.shape[0]
        return Part(0, (range(outputs),), outputs) if rank == 0 else None

    def of_change(self, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut a layer's LoRA matrices, [rank, inputs] and [outputs, rank]."""
        return (self.weight.of(down), up) if self.is_summed else (down, self.weight.of(up))


@dataclass(frozen=True, slots=True)
class Cuts:
    """A rank's part of a model. Weights that are not listed are whole."""

    linears: Mapping[str, Cut] = field(default_factory=dict)  # by layer
    experts: Mapping[str, ExpertCut] = field(default_factory=dict)  # by module
    sinks: Mapping[str, Part] = field(default_factory=dict)  # by parameter


NO_CUTS: Final = Cuts()


def plan_cuts(name: str, module: Any, layout: KvLayout, heads: int) -> Cuts:
    """Return the cuts of a whole `module` with `heads` query heads for `layout`'s shard. Raises: UnsupportedModel."""
    text = module.config.get_text_config()
    styles = getattr(text, "base_model_tp_plan", None)
    if not styles:
        raise UnsupportedModel(f"tensor_parallel={layout.shards}: transformers has no plan to cut {name}")
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):  # Gemma 3n
        raise UnsupportedModel(
            f"tensor_parallel={layout.shards}: {name} cannot be cut, because its layers keep the largest of all activations "
            "(activation_sparsity_pattern), and each rank has only its own"
        )
    added = OF_LATENTS if latent_size(text) else ADDED.get(text.model_type, {})
    styles = {**added, **styles}
    of_experts = getattr(text, "base_model_ep_plan", None) or {}
    prefix = "" if module.base_model is module else f"{module.base_model_prefix}."
    rank = _Rank(layout, heads)
    linears: dict[str, Cut] = {}
    experts: dict[str, ExpertCut] = {}
    try:
        for path, layer in module.base_model.named_modules():
            pattern = _pattern(path)
            style = styles.get(pattern)
            whole = _of_parameters(of_experts, pattern)
            if style == EXPERTS or WHOLE_EXPERTS in whole.values():
                parts = _of_parameters(styles, pattern)
                experts[prefix + path] = plan_experts(path, layer, whole, parts, layout.shard, layout.shards)
            elif style is not None and style not in WHOLE:
                parent = module.base_model.get_submodule(path.rpartition(".")[0])
                linears[prefix + path] = _cut(path, layer, style, parent, rank)
        sinks = {
            prefix + path: _sinks(path, parameter, styles.get(_pattern(path)), rank)
            for path, parameter in module.base_model.named_parameters()
            if path.rpartition(".")[2] == SINKS
        }
    except UnsupportedModel as exc:
        raise UnsupportedModel(f"tensor_parallel={layout.shards}: {name} cannot be cut: {exc}") from exc
    if not linears:
        raise UnsupportedModel(f"tensor_parallel={layout.shards}: transformers' plan cuts no attention of {name}")
    return Cuts(linears, experts, sinks)


def _pattern(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _of_parameters(styles: Mapping[str, str], pattern: str) -> dict[str, str]:
    """Return styles by name of the parameters at `pattern`."""
    return {path.rpartition(".")[2]: style for path, style in styles.items() if path.rpartition(".")[0] == pattern}


@dataclass(frozen=True, slots=True)
class _Rank:
    layout: KvLayout
    heads: int  # query heads of the model

    def of_heads(self, path: str, size: int) -> range:
        if size % self.heads:
            raise UnsupportedModel(f"{path} has {size} columns or rows, which {self.heads} heads do not divide")
        own, each = query_heads(self.heads, self.layout), size // self.heads
        return range(own.start * each, own.stop * each)

    def even(self, path: str, size: int) -> range:
        if size % self.layout.shards:
            raise UnsupportedModel(f"{path} has {size} columns or rows, which {self.layout.shards} does not divide")
        return share(size, self.layout.shard, self.layout.shards)

    def part(self, path: str, size: int, in_attention: bool) -> range:
        return self.of_heads(path, size) if in_attention else self.even(path, size)


def _cut(path: str, layer: Any, style: str, parent: torch.nn.Module, rank: _Rank) -> Cut:
    if type(layer) is not torch.nn.Linear:
        raise UnsupportedModel(f"{path} is {style}, but not a linear layer")
    leaf = path.rpartition(".")[2]
    shape = (layer.out_features, layer.in_features)
    in_attention = any(hasattr(parent, one) for one in (*KV_LAYERS, FUSED_QKV, FUSED_BY_HEAD))
    if style == OUTPUTS or (style == FUSED_OUTPUTS and leaf in FUSED):
        matrices = _matrices(path, shape[0], rank, in_attention)
        own_heads = (len(query_heads(rank.heads, rank.layout)), rank.layout.num_heads) if leaf == FUSED_QKV else None
        return Cut(Part(0, packed(matrices), shape[0]), shape, own_heads)
    if style == INPUTS or (style == FUSED_INPUTS and any(hasattr(parent, fused) for fused in FUSED)):
        return Cut(Part(1, (rank.part(path, shape[1], in_attention),), shape[1]), shape)
    raise UnsupportedModel(f"{path} is {style}: its module needs the outputs or inputs of all ranks")


def _sinks(path: str, parameter: torch.Tensor, style: str | None, rank: _Rank) -> Part:
    if style != OUTPUTS:
        raise UnsupportedModel(f"{path} is not in transformers' plan")
    return Part(0, (rank.of_heads(path, len(parameter)),), len(parameter))


def _matrices(path: str, outputs: int, rank: _Rank, in_attention: bool) -> list[tuple[int, range]]:
    """Return the rows of each matrix of the layer, and the rank's range of them."""
    layout, leaf = rank.layout, path.rpartition(".")[2]
    size = layout.head_dim
    keys = (layout.kv_heads * size, range(layout.heads.start * size, layout.heads.stop * size))
    if leaf in KV_LAYERS:
        found = [keys]
    elif leaf == FUSED_QKV:
        found = [(rank.heads * size, rank.of_heads(path, rank.heads * size)), keys, keys]
    elif leaf == FUSED_GATE and outputs % 2 == 0:
        found = [(outputs // 2, rank.even(path, outputs // 2))] * 2
    else:
        found = [(outputs, rank.part(path, outputs, in_attention))]
    if sum(rows for rows, _ in found) != outputs:
        raise UnsupportedModel(f"{path} has {outputs} rows, which do not match its heads")
    return found


def cut_weights(module: torch.nn.Module, cuts: Cuts, rank: int) -> None:
    for name, cut in cuts.linears.items():
        layer: Any = module.get_submodule(name)
        if cut.is_summed:
            layer.in_features = cut.weight.length
        else:
            layer.out_features = cut.weight.length
        layer.weight = cut.weight.parameter(layer.weight)
        if layer.bias is not None:
            bias = cut.bias(rank)
            layer.bias = None if bias is None else bias.parameter(layer.bias)
        if cut.heads is not None:
            _set_heads(module.get_submodule(name.rpartition(".")[0]), *cut.heads)
    for name, experts in cuts.experts.items():
        cut_experts(module.get_submodule(name), experts)
    for name, part in cuts.sinks.items():
        _replace(module, name, part.parameter(module.get_parameter(name)))


def _set_heads(attention: Any, heads: int, kv_heads: int) -> None:
    attention.num_key_value_heads = kv_heads
    attention.config.head_dim = attention.head_dim  # or it would be derived from the number of heads
    attention.config.num_attention_heads = heads


def join_sums(module: torch.nn.Module, cuts: Cuts) -> None:
    """Add sums over ranks after experts, and after layers whose inputs are cut, with their adapters."""
    for name, cut in cuts.linears.items():
        if cut.is_summed:
            _replace(module, name, Reduced(module.get_submodule(name)))
    for name, experts in cuts.experts.items():
        _replace(module, name, ReducedExperts(module.get_submodule(name), experts.owned))


def _replace(module: torch.nn.Module, name: str, by: torch.nn.Module | torch.nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, by)
