"""Linear layers in bfloat16 on x86, with packed weights; fast for few rows."""

from typing import Any, Final

import torch
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from engine.device.huge_pages import HugeMemory
from engine.kernels.shared_linear import SharedLinear, share_linears

PANEL: Final = 32  # output columns stored together


class PackedLinear(torch.nn.Module):
    """A `SharedLinear` with packed weights."""

    def __init__(self, packed: torch.nn.Parameter, bias: torch.nn.Parameter | None, first: int, last: int) -> None:
        super().__init__()
        self.packed = packed  # [out / PANEL, in / 2, PANEL, 2]
        self.bias = bias
        self._rows = slice(first, last)
        self._panels = slice(first // PANEL, last // PANEL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        if torch.compiler.is_compiling():
            y = torch.ops.kvmesh.linear(x, self.packed)[..., self._rows]
        else:
            y = torch.ops.kvmesh.linear(x, self.packed[self._panels])
        return y if self.bias is None else y + self.bias[self._rows]


class PackedGate(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), with gate, up and SiLU in one kernel."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, memory: HugeMemory) -> None:
        super().__init__()
        half = PANEL // 2
        halves = [layer.weight.detach().view(-1, half, layer.in_features) for layer in (gate, up)]
        self.packed = torch.nn.Parameter(pack(torch.stack(halves, dim=1).flatten(0, 2), memory), requires_grad=False)
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        return self.down_proj(torch.ops.kvmesh.gated_linear(x, self.packed))


class PackedHead(torch.nn.Module):
    """An output layer without bias, whose logits are fp32."""

    def __init__(self, head: torch.nn.Linear, memory: HugeMemory) -> None:
        super().__init__()
        self.packed = torch.nn.Parameter(pack(head.weight.detach(), memory), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kvmesh.logits(x if x.is_contiguous() else x.contiguous(), self.packed)


def is_packed(module: torch.nn.Module) -> bool:
    return any(isinstance(layer, PackedLinear | PackedGate | PackedHead) for layer in module.modules())


def sums_in_one_order(module: torch.nn.Module) -> bool:
    """Return whether products are batch invariant: each matrix is packed or an embedding."""
    safe = (PackedLinear, PackedGate, PackedHead, torch.nn.Embedding)
    others = [layer for layer in module.modules() if not isinstance(layer, safe)]
    return is_packed(module) and all(p.dim() < 2 for layer in others for p in layer.parameters(recurse=False))


def can_pack() -> bool:
    """Return whether the kernels were compiled for AVX2 or more."""
    return hasattr(torch.ops.kvmesh, "linear")


def pack_linears(module: torch.nn.Module) -> int:
    """Replace supported linear layers. Those with the same input are packed together.

    Returns: their number; 0 without AVX2.
    """
    if not can_pack():
        return 0
    memory = HugeMemory()
    replaced = _pack_gates(module, memory) + _pack_head(module, memory)
    share_linears(module)
    packed: dict[int, torch.nn.Parameter] = {}  # by id of weights, which siblings share
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            rows = _rows(layer)
            if rows is None:
                continue
            plain: Any = layer
            if id(plain.weight) not in packed:
                packed[id(plain.weight)] = torch.nn.Parameter(pack(plain.weight.detach(), memory), requires_grad=False)
            setattr(parent, name, PackedLinear(packed[id(plain.weight)], plain.bias, rows.start, rows.stop))
            replaced += 1
    return replaced


def pack(weight: torch.Tensor, memory: HugeMemory) -> torch.Tensor:
    """Return bfloat16 [out, in] as [out / PANEL, in / 2, PANEL, 2], the kernel's order."""
    out_size, in_size = weight.shape
    panels = weight.view(out_size // PANEL, PANEL, in_size // 2, 2).transpose(1, 2)
    return memory.take(tuple(panels.shape), weight.dtype).copy_(panels)


def _pack_gates(module: torch.nn.Module, memory: HugeMemory) -> int:
    replaced = 0
    for parent in list(module.modules()):
        for name, mlp in list(parent.named_children()):
            if _is_gated(mlp):
                layers: Any = mlp
                setattr(parent, name, PackedGate(layers.gate_proj, layers.up_proj, layers.down_proj, memory))
                replaced += 2
    return replaced


def _pack_head(module: Any, memory: HugeMemory) -> int:
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is None or type(head) is not torch.nn.Linear or head.bias is not None or _rows(head) is None:
        return 0
    module.set_output_embeddings(PackedHead(head, memory))
    return 1


def _is_gated(mlp: Any) -> bool:
    """Return whether `mlp` has the bytecode of Llama's MLP, uses SiLU and has no biases."""
    code, usual = getattr(type(mlp).forward, "__code__", None), LlamaMLP.forward.__code__
    if code is None or (code.co_code, code.co_names) != (usual.co_code, usual.co_names):
        return False
    if not isinstance(mlp.act_fn, torch.nn.SiLU | SiLUActivation):
        return False
    pair = mlp.gate_proj, mlp.up_proj
    return all(_rows(layer) is not None and type(layer) is torch.nn.Linear and layer.bias is None for layer in pair)


def _rows(layer: Any) -> slice | None:
    """Return the rows of its weights that `layer` uses; None if it is unsupported."""
    if type(layer) is torch.nn.Linear:
        rows = slice(0, layer.out_features)
    elif type(layer) is SharedLinear:
        rows = layer.rows
    else:
        return None
    weight = layer.weight
    fits = weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0
    return rows if fits and not any(n % PANEL for n in (len(weight), rows.start, rows.stop)) else None
