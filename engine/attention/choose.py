"""Which backend of attention an engine gets."""

import logging
from pathlib import Path

import torch

from components.errors import MeshError
from components.kv_transfer.layout import KvLayout
from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.native import NativeAttention
from engine.config import AttentionKind
from engine.kernels.build import KernelsUnavailable, kernels_are_loaded, load_kernels

log = logging.getLogger(__name__)

HEAD_DIM_STEP = 16  # the C++ kernel takes heads of so many numbers, or a multiple


class BackendUnavailable(MeshError):
    """The attention backend that was asked for cannot run here; the message says what would."""


def prepare_attention(kind: AttentionKind, device: torch.device, state_dir: Path) -> None:
    """Load what `make_attention` may need; it can take some seconds, once for a machine. Raises: BackendUnavailable."""
    if device.type != "cpu" or kind == "torch":
        return
    try:
        load_kernels(state_dir)
    except KernelsUnavailable as exc:
        if kind == "cpu":
            raise BackendUnavailable(f"attention=cpu cannot run here, attention=torch could: {exc}") from exc
        log.info("attention runs in plain torch operations", extra={"reason": str(exc)})


def make_attention(kind: AttentionKind, pool: torch.Tensor, layout: KvLayout, query_group: int) -> AttentionBackend:
    """The backend `kind` over `pool`, [num_pages, kv_heads, layers, 2, page_size, head_dim]. Raises: BackendUnavailable."""
    obstacle = why_not_native(kind, pool.device, layout)
    if obstacle is None:
        return NativeAttention(pool, layout)
    if kind == "cpu":
        raise BackendUnavailable(f"attention=cpu cannot run here, attention=torch could: {obstacle}")
    return CpuAttention(pool, layout, query_group)


def why_not_native(kind: AttentionKind, device: torch.device, layout: KvLayout) -> str | None:
    """Why attention is not the C++ kernel's; None: it is."""
    if kind == "torch":
        return "attention=torch was asked for"
    if device.type != "cpu":
        return f"the model is on {device}"
    if not kernels_are_loaded():
        return "its kernel is not loaded"
    if layout.head_dim % HEAD_DIM_STEP:
        return f"a head has {layout.head_dim} numbers, which is no multiple of {HEAD_DIM_STEP}"
    return None
