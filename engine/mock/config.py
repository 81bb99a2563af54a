"""Settings of the mock engine, such as `MESH_ENGINE__MOCK__SPEEDUP`, and its cost model."""

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Seconds = Annotated[float, Field(ge=0)]
Size = Annotated[int | None, Field(gt=0)]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class MockConfig:
    """Costs and KV shape. The defaults are SmolLM2-135M's on two CPU cores."""

    speedup: Annotated[float, Field(gt=0, description="time runs so much faster; inf: no step waits at all")] = 1.0
    step_s: Annotated[Seconds, Field(description="any step, whatever is in it")] = 0.0104
    decode_s: Annotated[Seconds, Field(description="each request that decodes in it")] = 0.0009
    context_token_s: Annotated[Seconds, Field(description="each token that these attend to")] = 4e-7
    prompt_token_s: Annotated[Seconds, Field(description="each prompt token computed")] = 0.0005
    attention_s: Annotated[
        Seconds, Field(description="each pair of a prompt token and one it attends to: long prompts cost more a token")
    ] = 0.0
    answer_tokens: Annotated[
        int, Field(ge=0, description="mean length of answers that may end by themselves; 0: none does")
    ] = 128
    layers: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    kv_heads: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    head_dim: Annotated[Size, Field(description="of a KV page; default: the model's")] = None
    thread: Annotated[
        bool, Field(description="a thread for the engine, as a model's has; else it is stepped on the event loop")
    ] = False

    def duration_s(self, prompt_tokens: int, decodes: int, context_tokens: int, pairs: int = 0) -> float:
        """Duration of a step.

        Args:
            prompt_tokens: computed in the step.
            decodes: requests that get a token.
            context_tokens: total context of the decodes.
            pairs: prompt tokens times the tokens that they attend to; see `attended`.
        """
        if not prompt_tokens and not decodes:
            return 0.0
        prompt_s = prompt_tokens * self.prompt_token_s + pairs * self.attention_s
        decode_s = decodes * self.decode_s + context_tokens * self.context_token_s
        return (self.step_s + prompt_s + decode_s) / self.speedup


def attended(start: int, length: int) -> int:
    """Pairs of a token and one it attends to, itself included, for `length` prompt tokens after `start`."""
    return length * start + length * (length + 1) // 2
