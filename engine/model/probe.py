"""Check a model's attention by running one token through it at load.

Configurations name windows and caps in many ways, so transformers' mask functions are compared with our arguments.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from components.startup import CannotServe
from engine.attention.backend import IMPLEMENTATION, AttentionBackend, Scoring, StepAttention, StepShape, attend_paged
from engine.device.memory import BESIDE_OTHERS
from engine.errors import UnsupportedModel
from engine.model.load import LoadedModel

PROBE: Final = "kvmesh-probe"
POSITIONS: Final = 1 << 18  # compared; a window of at least this size counts as none


@torch.inference_mode()
def check_attention(loaded: LoadedModel, attention: AttentionBackend) -> int:
    """Run one token through page 0, which is unused.

    Returns: the maximum number of keys that any layer reads, including the token's own; 0: all.
    Raises: UnsupportedModel, if a layer attends without our function or with a mask that we would not apply; CannotServe,
    if the device has no memory left.
    """
    config = loaded.module.config
    refused = f"{loaded.layout.model} does not run on paged attention"
    if config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedModel(f"{refused}: it was set to {config._attn_implementation}")
    zero = torch.zeros((1, 1), dtype=torch.int64, device=loaded.device)
    witness = _Witness(attention.plan(StepShape(query_lens=[1], context_lens=[1], block_tables=[[0]])), loaded)
    config._attn_implementation = PROBE
    try:
        loaded.module(input_ids=zero, position_ids=zero, use_cache=False, step_attention=witness)
    except torch.OutOfMemoryError as exc:  # the weights fitted, so other processes hold the rest
        raise CannotServe(
            f"too little memory on {loaded.device} for one token ({exc}). To do: {BESIDE_OTHERS}"
        ) from exc
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError, UnsupportedModel) as exc:
        raise UnsupportedModel(f"{refused}: {exc}") from exc
    finally:
        config._attn_implementation = IMPLEMENTATION
    if witness.layers != list(range(loaded.layout.layers)):
        raise UnsupportedModel(f"{refused}: of {loaded.layout.layers} layers, those that use it are {witness.layers}")
    return max(witness.windows) if all(witness.windows) else 0


class _Witness:
    """Records layers that attend, and refuses unexpected shapes."""

    def __init__(self, step: StepAttention, loaded: LoadedModel) -> None:
        self.layers: list[int] = []
        self.windows: list[int] = []
        self._step = step
        layout = loaded.layout
        self._kv_shape = (1, layout.num_heads, 1, layout.head_dim)
        self._query_shape = (1, layout.num_heads * loaded.query_group, 1, layout.head_dim)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        if shapes != [self._query_shape, self._kv_shape, self._kv_shape]:
            raise UnsupportedModel(f"layer {layer} has queries, keys and values of shapes {shapes}")
        self.layers.append(layer)
        self.windows.append(scoring.window)
        return self._step.attend(layer, query, key, value, scoring, sinks=sinks)


def _mask(*, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """Mask hook of transformers.

    Returns: int64 [1, 1, 1, 1], the number of keys that the last of `POSITIONS` queries sees.
    Raises: UnsupportedModel, for a mask that is more than a window.
    """
    keys = torch.arange(POSITIONS + 1)
    queries = torch.tensor([[0], [POSITIONS // 2], [POSITIONS - 2], [POSITIONS - 1]])
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask_function(zero, zero, queries, keys).expand(len(queries), -1)
    window = seen[-1].sum()
    if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
        raise UnsupportedModel("its attention is neither causal nor through a sliding window")
    return window.view(1, 1, 1, 1)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compare the mask, then call `attend_paged`. Raises: UnsupportedModel."""
    if attention_mask is None or attention_mask.shape != (1, 1, 1, 1) or attention_mask.dtype != torch.int64:
        raise UnsupportedModel(f"{type(module).__name__} does not take transformers' masks as they are")
    if min(sliding_window or POSITIONS, POSITIONS) != (window := int(attention_mask)):
        raise UnsupportedModel(f"{type(module).__name__} asks for a window of {sliding_window}, and masks {window}")
    return attend_paged(module, query, key, value, None, sliding_window=sliding_window, **options)


AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _mask)
