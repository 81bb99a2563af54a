"""Multi-head latent attention (MLA), computed on latents: all heads share one key, which is also the value.

A layer with MLA computes each head's keys and values from one latent per token. Transformers' modules do so before
attention. Here the matrices of this product are applied to the queries and to the results instead, so that a page holds a
latent per token and layer, whatever the number of heads.

Source: DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1.
"""

import sys
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor

EXPAND: Final = "expand_kv"  # the method of transformers' modules that computes keys and values from latents
EXPANSION: Final = "kv_b_proj"  # the layer with its weights
LATENT: Final = "of_queries"  # attribute of the modules that attend to latents


def latent_size(config: Any) -> int:
    """Return the numbers of a latent and of the rotated part of its key; 0 without MLA."""
    rank = getattr(config, "kv_lora_rank", None)
    return int(rank + config.qk_rope_head_dim) if rank else 0


def expands_latents(model_class: type) -> bool:
    """Return whether the modules of a model of transformers compute keys and values by a method that can be replaced."""
    found = vars(sys.modules[model_class.__module__]).values()
    return any(isinstance(kind, type) and hasattr(kind, EXPAND) for kind in found)


def keep_latents(module: torch.nn.Module) -> None:
    """Let all layers with MLA attend to latents. Their weights must be loaded, and cut if there are several ranks."""
    for layer in list(module.modules()):
        if hasattr(layer, EXPAND):
            _keep_latents(layer)


def _keep_latents(layer: Any) -> None:
    weight = getattr(layer, EXPANSION).weight.detach()
    by_head = weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, weight.shape[1])
    of_queries, of_values = by_head.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    layer.of_queries = torch.nn.Parameter(of_queries.contiguous(), requires_grad=False)  # [H, nope, rank]
    layer.of_values = torch.nn.Parameter(
        of_values.transpose(1, 2).contiguous(), requires_grad=False
    )  # [H, rank, values]
    delattr(layer, EXPANSION)
    setattr(layer, EXPAND, MethodType(_latents, layer))


def _latents(_layer: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return [1, 1, T, latent_size] as the key and as the value, whose rotated part is not used."""
    key = torch.cat((latent, rotated), dim=-1)
    return key, key


def latent_queries(layer: Any, query: Tensor) -> Tensor:
    """Return [1, H, T, latent_size] for queries [1, H, T, nope + rotated]."""
    plain, rotated = query[..., : layer.qk_nope_head_dim], query[..., layer.qk_nope_head_dim :]
    return torch.cat((plain @ layer.of_queries, rotated), dim=-1)


def attended_values(layer: Any, attended: Tensor) -> Tensor:
    """Return [1, T, H, v_head_dim] for results [1, T, H, latent_size]."""
    latents = attended[..., : layer.kv_lora_rank].transpose(1, 2)
    return (latents @ layer.of_values).transpose(1, 2)
