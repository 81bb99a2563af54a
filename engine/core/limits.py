"""Limits of the requests that an engine accepts."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from components.errors import PromptTooLong, Rejected
from engine.ports import EngineRequest, Phase
from engine.sampling.bounds import check_sampling, check_token_ids


@dataclass(frozen=True, slots=True)
class Limits:
    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    embeds: bool = False

    def check(self, request: EngineRequest, tokens: Sequence[int], taken: Container[str]) -> None:
        """Refuse a request that breaks a limit.

        Raises: PromptTooLong; Rejected, naming the parameter.
        """
        if request.request_id in taken:
            raise Rejected(f"request id {request.request_id!r} is in use", param="request_id")
        if not tokens:
            raise Rejected("a prompt needs at least one token", param="token_ids")
        if (request.phase is Phase.EMBED) != self.embeds:
            raise Rejected(
                "this model makes embeddings" if self.embeds else "this model makes no embeddings", param="model"
            )
        if len(tokens) > self.max_context - (not self.embeds):
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; {'' if self.embeds else 'with at least one more to generate, '}"
                f"this worker takes {self.max_context}",
                prompt_tokens=len(tokens),
                max_context=self.max_context,
            )
        if not 0 <= request.num_generated < len(tokens):
            raise Rejected(
                f"num_generated is {request.num_generated}; it must be from 0 to below the {len(tokens)} tokens given",
                param="num_generated",
            )
        if request.phase is Phase.DECODE and request.sampling.prompt_logprobs is not None:
            raise Rejected("prompt_logprobs come from where the prompt is computed", param="prompt_logprobs")
        check_token_ids(tokens, self.vocab_size, "token_ids")
        check_sampling(request.sampling, self.vocab_size, self.eos_token_ids, request.num_generated)
