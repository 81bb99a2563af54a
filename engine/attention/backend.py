"""What a backend of attention is given and must give; how transformers' models are made to call it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface

from engine.model.errors import UnsupportedModel

IMPLEMENTATION: Final = "kvmesh"  # what `from_pretrained(attn_implementation=...)` is told
# What attention modules pass that changes nothing here: nothing is dropped out in eval mode, positions are in the queries
# and keys already, and the rest is what the forward was asked to return.
HARMLESS: Final = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"})


@dataclass(frozen=True, slots=True)
class StepShape:
    """Which tokens of which requests make up a step; R requests, their T tokens one after the other.

    Requests with one token come first, by ascending context: a backend may treat each such span as one batch.
    """

    query_lens: Sequence[int]  # [R] tokens computed in this step
    context_lens: Sequence[int]  # [R] tokens whose KV stands after it, these included
    block_tables: Sequence[Sequence[int]]  # [R] pages of each request, at least enough for its context


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer turns products of queries and keys into weights."""

    scaling: float
    window: int = 0  # keys that a query sees, its own included, counted back from it; 0: all of them
    softcap: float = 0.0  # scores are softcap * tanh(scores / softcap); 0: as they are


class StepAttention(Protocol):
    """A backend, ready for one step. It is handed through the model's forward and is of no use afterwards."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write this layer's new keys and values into their slots, then attend.

        Args:
            layer: index of the decoder layer.
            query: [1, heads, T, head_dim].
            key: [1, kv_heads, T, head_dim], of the new tokens alone.
            value: shaped as key.
            scoring: of this layer.
        Returns: [1, T, heads, head_dim].
        """


class AttentionBackend(Protocol):
    """Attention over the page pool; made once for an engine."""

    def plan(self, shape: StepShape) -> StepAttention:
        """Turn a step's block tables into index tensors, once for all layers."""


def attend_paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step_attention: StepAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call. The step travels as an argument of the forward.

    Raises: UnsupportedModel, for attention that is more than this; loading runs one token to find out.
    """
    unknown = [name for name, given in options.items() if given is not None and name not in HARMLESS]
    if attention_mask is not None or unknown:
        asked = ", ".join(sorted(unknown)) or "a mask"
        raise UnsupportedModel(f"{type(module).__name__} asks attention for {asked}")
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0)
    return step_attention.attend(module.layer_idx, query, key, value, scoring), None


AttentionInterface.register(IMPLEMENTATION, attend_paged)
