"""Choose an attention backend. Only the chosen one is imported, because others may not be installed."""

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from components.startup import WrongSettings
from components.wire.layout import KvLayout
from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.plain import PlainAttention
from engine.attention.step_tables import StepLimits
from engine.config import AttentionKind
from engine.device.c_compiler import find_c_compiler
from engine.kernels.native_library import KernelsUnavailable, kernels_are_loaded, load_kernels

log = logging.getLogger(__name__)

HEAD_DIM_STEP: Final = 16  # of the C++ kernel
# of the Triton kernels: with larger heads, blocks exceed a GPU's shared memory, or spill registers
LARGEST_HEAD: Final = 256
EIGHT_BITS: Final = "compute capability 8.9"
# name: needed module, its package, our module and class
ON_CUDA: Final = {
    "triton": ("triton", "triton", "engine.attention.triton_backend", "TritonAttention"),
    "flashinfer": ("flashinfer", "flashinfer-python", "engine.attention.flashinfer_backend", "FlashInferAttention"),
}


class AttentionUnavailable(WrongSettings):
    pass


def prepare_attention(kind: AttentionKind, device: torch.device, state_dir: Path) -> None:
    """Load the kernels, which are compiled once per machine. Raises: AttentionUnavailable."""
    if device.type != "cpu" or kind not in ("auto", "cpu"):
        return
    try:
        load_kernels(state_dir)
    except KernelsUnavailable as exc:
        if kind == "cpu":
            raise AttentionUnavailable(f"attention=cpu cannot run here (attention=torch can): {exc}") from exc
        log.warning(
            "no C++ kernels: attention and linear layers run in plain torch operations, several times as slow",
            extra={"reason": str(exc)},
        )


def make_attention(
    kind: AttentionKind,
    pool: torch.Tensor,
    layout: KvLayout,
    query_group: int,
    limits: StepLimits,
    *,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Create a backend for `pool`, [num_pages, kv_heads, layers, 2, page_size, head_dim].

    Args:
        dtype: of queries; None: the pool's.

    Raises: AttentionUnavailable.
    """
    chosen = _automatic(pool.device, layout) if kind == "auto" else kind
    if chosen == "torch":
        return PlainAttention(pool, layout, query_group, dtype)
    if chosen == "cpu":
        obstacle = why_not_cpu("cpu", pool.device, layout)
        if obstacle is not None:
            raise AttentionUnavailable(f"attention=cpu cannot run here (attention=torch can): {obstacle}")
        return CpuAttention(pool, layout)
    needed, distribution, module, name = ON_CUDA[chosen]
    if find_spec(needed) is None:
        raise AttentionUnavailable(f"attention={chosen} needs the package {distribution}: pip install {distribution}")
    if pool.device.type != "cuda" and not (chosen == "triton" and _interpreted()):
        raise AttentionUnavailable(f"attention={chosen} needs a CUDA device, the model is on {pool.device}")
    if chosen == "triton" and layout.head_dim > LARGEST_HEAD:
        raise AttentionUnavailable(
            f"attention=triton takes heads of at most {LARGEST_HEAD} numbers, and the model's have {layout.head_dim}; "
            "attention=torch takes any, slowly"
        )
    if chosen == "triton" and not takes_pages(pool.device, layout):
        raise AttentionUnavailable(
            f"attention=triton reads 8-bit pages on {EIGHT_BITS} and newer; attention=torch does so on any, slowly"
        )
    backend: AttentionBackend = getattr(import_module(module), name)(pool, layout, query_group, limits, dtype=dtype)
    return backend


def why_not_cpu(kind: AttentionKind, device: torch.device, layout: KvLayout) -> str | None:
    if kind not in ("auto", "cpu"):
        return f"attention={kind} was asked for"
    if device.type != "cpu":
        return f"the model is on {device}"
    if not kernels_are_loaded():
        return "its kernel is not loaded"
    if layout.head_dim % HEAD_DIM_STEP:
        return f"a head has {layout.head_dim} numbers, which is not a multiple of {HEAD_DIM_STEP}"
    return None


def _automatic(device: torch.device, layout: KvLayout) -> str:
    if device.type != "cuda":
        return "cpu" if why_not_cpu("auto", device, layout) is None else "torch"
    needed = {
        "triton": find_spec("triton") is not None,
        "a C compiler with Python.h": find_c_compiler() is not None,
        f"kernels for heads of {layout.head_dim} numbers": layout.head_dim <= LARGEST_HEAD,
        f"8-bit floats, which devices have from {EIGHT_BITS} on": takes_pages(device, layout),
    }
    missing = [name for name, there in needed.items() if not there]
    if missing:
        log.warning("attention runs in plain torch operations, slow on a GPU", extra={"missing": " and ".join(missing)})
        return "torch"
    return "triton"


def takes_pages(device: torch.device, layout: KvLayout) -> bool:
    """Return whether Triton can compile for the dtype of pages on this device."""
    if layout.dtype != "fp8_e4m3" or device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # makes Triton run kernels in Python
