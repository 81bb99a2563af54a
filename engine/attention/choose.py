"""Which backend of attention an engine gets. Only that one is imported: kernels and their compilers are optional."""

import logging
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from components.errors import MeshError
from components.kv_transfer.layout import KvLayout
from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.step_tables import StepLimits
from engine.config import AttentionKind

log = logging.getLogger(__name__)

# backend: the module that its kernels need, what pip calls it, and the class of ours
BACKENDS: Final = {
    "triton": ("triton", "triton", "engine.attention.triton_backend", "TritonAttention"),
    "flashinfer": ("flashinfer", "flashinfer-python", "engine.attention.flashinfer_backend", "FlashInferAttention"),
}


class BackendUnavailable(MeshError):
    """The attention backend that was asked for cannot run here; the message says what would."""


def make_attention(
    kind: AttentionKind, pool: torch.Tensor, layout: KvLayout, query_group: int, limits: StepLimits
) -> AttentionBackend:
    """The backend `kind` over `pool`, [num_pages, kv_heads, layers, 2, page_size, head_dim]. Raises: BackendUnavailable."""
    chosen = _automatic(pool.device) if kind == "auto" else kind
    if chosen == "cpu":
        return CpuAttention(pool, layout, query_group)
    needed, distribution, module, name = BACKENDS[chosen]
    if find_spec(needed) is None:
        raise BackendUnavailable(f"attention={chosen} needs the package {distribution}: pip install {distribution}")
    if pool.device.type != "cuda" and not (chosen == "triton" and _interpreted()):
        raise BackendUnavailable(f"attention={chosen} needs a CUDA device, the model is on {pool.device}")
    backend: AttentionBackend = getattr(import_module(module), name)(pool, layout, query_group, limits)
    return backend


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    missing = [
        name for name, there in (("triton", find_spec("triton")), ("a C compiler", find_c_compiler())) if not there
    ]
    if missing:
        log.warning("attention runs in plain torch operations, slow on a GPU", extra={"missing": " and ".join(missing)})
        return "cpu"
    return "triton"


def find_c_compiler() -> str | None:
    """The one with which triton makes its kernels callable."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))), None)


def _interpreted() -> bool:
    """Whether Triton runs kernels in Python, as it does for tests: it looks at this itself when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
