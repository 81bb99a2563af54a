"""Attention backends, and the function that transformers' modules call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor
from transformers import AttentionInterface

from engine.attention.latent import LATENT, attended_values, latent_queries
from engine.errors import UnsupportedModel

IMPLEMENTATION: Final = "kvmesh"  # for `from_pretrained(attn_implementation=...)`
# without effect in eval mode
HARMLESS: Final = frozenset({"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"})


@dataclass(frozen=True, slots=True)
class StepShape:
    """R requests. Those with one token come first, by ascending context, so that a backend can batch them."""

    query_lens: Sequence[int]  # [R] consecutive tokens computed in this step
    context_lens: Sequence[int]  # [R] tokens with KV after the step
    block_tables: Sequence[Sequence[int]]  # [R] page ids, enough for the context


@dataclass(frozen=True, slots=True)
class Scoring:
    scaling: float
    window: int = 0  # keys that a query reads, including its own; 0: all
    softcap: float = 0.0  # softcap * tanh(scores / softcap); 0: off


class StepAttention(Protocol):
    """A backend's plan for one step."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Write the new keys and values into their slots, then attend.

        Args:
            layer: index of the decoder layer.
            query: [1, heads, T, head_dim].
            key: [1, kv_heads, T, head_dim], new tokens only.
            value: shaped like key.
            sinks: [heads], a score each that joins the softmax without a value; None: none.
        Returns: [1, T, heads, head_dim].
        """


class AttentionBackend(Protocol):
    def plan(self, shape: StepShape) -> StepAttention: ...


def attend_paged(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step_attention: StepAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a module of transformers, which calls sinks `s_aux`.

    Raises: UnsupportedModel, for arguments that change attention in other ways.
    """
    unknown = [name for name, given in options.items() if given is not None and name not in HARMLESS]
    if attention_mask is not None or unknown:
        asked = ", ".join(sorted(unknown)) or "a mask"
        raise UnsupportedModel(f"{type(module).__name__} asks attention for {asked}")
    scoring = Scoring(scaling, sliding_window or 0, softcap or 0.0)
    if not hasattr(module, LATENT):
        return step_attention.attend(module.layer_idx, query, key, value, scoring, sinks=s_aux), None
    query = latent_queries(module, query)
    attended = step_attention.attend(module.layer_idx, query, key, value, scoring, sinks=s_aux)
    return attended_values(module, attended), None


AttentionInterface.register(IMPLEMENTATION, attend_paged)
