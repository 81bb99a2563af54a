"""Apply the results of steps and transfers to requests, and detect an engine that can no longer compute."""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from components.errors import NonFiniteLogits, Rejected
from components.startup import CannotServe
from components.wire.logprobs import TokenLogprobs
from components.wire.step_stats import NO_DRAFTS, DraftCounts
from engine.core.open_requests import Limits, Requests
from engine.ports import Embedded, Exposed, Failed, FinishReason, Phase, StepOutput, TokenMask, TokenOutput
from engine.sampling.bounds import check_token_ids
from engine.sampling.row import NO_TOKEN
from engine.scheduler.request import Chunk, Request, RequestMemory
from engine.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_FAILED_STEPS: Final = 5  # steps in a row
FULL: Final = Phase.FULL  # enum attributes are slow


class EngineBroken(CannotServe):
    pass


class FailedSteps:
    """Counts failed steps that had a new prompt, so that retries of one request cannot end the process."""

    def __init__(self) -> None:
        self._prompts: set[int] = set()  # hashes
        self._count = 0
        self._cause = ""

    def failed(self, requests: Iterable[Request], cause: str) -> None:
        prompts = {hash(tuple(r.tokens[: r.prompt_len])) for r in requests}
        self._count += not prompts <= self._prompts
        self._prompts |= prompts
        self._cause = cause

    def landed(self) -> None:
        if self._prompts:
            self._prompts.clear()
            self._count = 0

    def check(self) -> None:
        if self._count >= MAX_FAILED_STEPS:
            log.critical("every step fails, so the engine stops", extra={"steps": self._count, "cause": self._cause})
            raise EngineBroken(f"{self._count} steps in a row failed, the last one with: {self._cause}")


class Outcomes:
    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        memory: RequestMemory,
        limits: Limits,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._memory = memory
        self._limits = limits
        self.draft_counts = NO_DRAFTS  # of all requests

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None) -> list[TokenOutput]:
        request = self._requests.reserved(request_id)
        if request is None:
            return []
        check_token_ids([first_token], self._limits.vocab_size, "first_token")
        _check_allowed(request, first_token)
        request.phase, request.disaggregated = Phase.FULL, True
        request.num_computed = request.prompt_len
        self._memory.computed(request)
        self._scheduler.start(request)
        self._requests.fork(request)
        if request.branch in request.unwanted:
            self._requests.finish(request)
            return []
        finish = self._append(request, first_token)
        if finish is not None:
            self._requests.finish(request)
        cached = request.num_cached_tokens
        return [TokenOutput(request_id, [first_token], finish, cached, 0, None if logprobs is None else [logprobs])]

    def commit(self, chunk: Chunk, drawn: Sequence[int], output: StepOutput) -> None:
        request = chunk.request
        if chunk.drafts:
            drawn = self._verified(chunk, drawn)
        if drawn and drawn[-1] == NO_TOKEN:
            self._fail_non_finite(request, output)
            return
        phase = request.phase
        request.num_computed = chunk.end - len(chunk.drafts)
        self._memory.computed(request)
        if phase is FULL:
            if drawn:
                self._continue(chunk, drawn, output)
        elif phase is Phase.PREFILL:
            pages, computed, cached = list(request.pages), request.num_computed, request.num_cached_tokens
            if not drawn:
                output.computed.append(Exposed(request.id, pages, computed, cached))
                return
            finish = self._append(request, drawn[0])
            if request.mask is not None and self._fail_if_violated(request, request.mask, output):
                return
            logprobs = request.row.logprobs, request.row.prompt_logprobs
            output.computed.append(Exposed(request.id, pages, computed, cached, drawn[0], finish, *logprobs))
            self._requests.end(request)
        elif chunk.samples:  # EMBED
            output.embedded.append(Embedded(request.id, request.vector, request.num_cached_tokens))
            self._requests.finish(request)

    def _verified(self, chunk: Chunk, drawn: Sequence[int]) -> Sequence[int]:
        """Return each accepted draft, and the token drawn after the last of them."""
        accepted = 0
        while accepted < len(chunk.drafts) and drawn[accepted] == chunk.drafts[accepted]:
            accepted += 1
        request, new = chunk.request, DraftCounts(len(chunk.drafts), accepted)
        request.draft_counts = request.draft_counts.plus(new)
        self.draft_counts = self.draft_counts.plus(new)
        return drawn[: accepted + 1]

    def _continue(self, chunk: Chunk, drawn: Sequence[int], output: StepOutput) -> None:
        request, row = chunk.request, chunk.request.row
        prompt_logprobs = None
        if len(request.tokens) == request.prompt_len:
            self._requests.fork(request)
            prompt_logprobs = row.prompt_logprobs
            if request.branch in request.unwanted:
                self._requests.finish(request)
                return
        token_ids = [drawn[0]]
        finish = self._append(request, drawn[0])
        for token_id in drawn[1:]:  # the token before it was a draft, so that has KV
            if finish is not None:
                break
            request.num_computed += 1
            token_ids.append(token_id)
            finish = self._append(request, token_id)
        if request.mask is not None and self._fail_if_violated(request, request.mask, output):
            return
        logprobs = None
        if row.logprobs is not None:
            logprobs = [row.logprobs for row in chunk.rows[: len(token_ids)] if row.logprobs is not None]
        cached, counts = request.num_cached_tokens, request.draft_counts if chunk.drafts else None
        output.tokens.append(
            TokenOutput(request.id, token_ids, finish, cached, request.branch, logprobs, prompt_logprobs, counts)
        )
        if finish is not None:
            self._requests.finish(request)

    def _append(self, request: Request, token_id: int) -> FinishReason | None:
        tokens = request.tokens
        tokens.append(token_id)
        if request.mask is not None:
            request.mask.accept(token_id)
            if request.mask.is_complete:
                return FinishReason.STOP
        if self._limits.stops(request.sampling, token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= request.limit else None

    def _fail_non_finite(self, request: Request, output: StepOutput) -> None:
        log.error("logits are not finite", extra={"request_id": request.id, "tokens": len(request.tokens)})
        for branch in self._requests.branches(request.id):
            self._memory.forget(branch)
        self._requests.cancel(request.id)
        message = "the model computed NaN or infinite logits for this request"
        output.failed.append(Failed(request.id, NonFiniteLogits(message, request_id=request.id)))

    def _fail_if_violated(self, request: Request, mask: TokenMask, output: StepOutput) -> bool:
        if (fault := mask.fault) is None:
            return False
        log.warning("constraint violated", extra={"request_id": request.id, "reason": fault})
        self._requests.cancel(request.id)
        message = (
            "the constraint allows no further token, or checking it exceeds its limits; simplify the schema or grammar"
        )
        output.failed.append(Failed(request.id, Rejected(message)))
        return True


def _check_allowed(request: Request, first_token: int) -> None:
    if request.mask is None or request.branch in request.unwanted:
        return
    tried = request.mask.fork()
    tried.accept(first_token)
    if (fault := tried.fault) is not None:
        raise Rejected(f"the constraint does not allow the first token {first_token}: {fault}", param="first_token")
