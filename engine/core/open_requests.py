"""All requests by id, until their pages are free, and the limits on requests that an engine accepts."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from components.errors import PromptTooLong, Rejected
from components.wire.sampling import SamplingParams
from engine.ports import EngineRequest, Phase
from engine.sampling.bounds import check_sampling, check_token_ids
from engine.scheduler.request import Chunk, Request, RequestMemory, RequestState
from engine.scheduler.scheduler import Scheduler


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
                "this model computes embeddings" if self.embeds else "this model computes no embeddings", param="model"
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
            raise Rejected(
                "prompt_logprobs are not available here: prefill computes this prompt", param="prompt_logprobs"
            )
        if len(request.prediction) > self.max_context:
            raise Rejected(
                f"the prediction has {len(request.prediction)} tokens, this worker takes {self.max_context}",
                param="prediction",
            )
        check_token_ids(tokens, self.vocab_size, "token_ids")
        check_token_ids(request.prediction, self.vocab_size, "prediction")
        check_sampling(request.sampling, self.vocab_size, self.eos_token_ids, request.num_generated)

    def length(self, num_tokens: int, sampling: SamplingParams) -> int:
        """Return the total number of tokens at which a request ends."""
        return min(num_tokens + sampling.max_tokens, self.max_context)

    def stops(self, sampling: SamplingParams, token_id: int) -> bool:
        return token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in self.eos_token_ids)


class Requests:
    """A request that has ended keeps its pages while a transfer or the step in flight may use them."""

    def __init__(self, scheduler: Scheduler, memory: RequestMemory) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._live: dict[str, Request] = {}
        self._held: dict[str, Request] = {}  # ended, but their pages are still exposed
        self._branches: dict[str, list[Request]] = {}  # live branches, except branch 0
        self._leaving: set[Request] = set()  # ended, but the step in flight still uses their pages

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in known for known in (self._live, self._held, self._branches))

    def __iter__(self) -> Iterator[Request]:
        yield from self._live.values()
        yield from self._held.values()
        for branches in self._branches.values():
            yield from branches

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, request: Request) -> None:
        self._live[request.id] = request
        self._scheduler.add(request)

    def reserved(self, request_id: str) -> Request | None:
        request = self._live.get(request_id)
        return request if request is not None and request.state is RequestState.RESERVED else None

    def branches(self, request_id: str) -> list[Request]:
        """Return the live branches, and those that are leaving."""
        first = self._live.get(request_id)
        leaving = (request for request in self._leaving if request.id == request_id)
        return [*([] if first is None else [first]), *self._branches.get(request_id, ()), *leaving]

    def fork(self, request: Request) -> None:
        for number in range(1, request.sampling.n):
            if number in request.unwanted:
                continue
            branch = request.forked(number)
            self._branches.setdefault(request.id, []).append(branch)
            self._scheduler.fork(request, branch)

    def recompute(self, request_id: str, first_token: int | None = None) -> None:
        request = self._live.get(request_id)
        if request is None or request.phase is not Phase.DECODE:
            return
        if request.state is RequestState.WAITING:  # it has no pages yet, so prefill has not computed its first token
            request.phase = Phase.FULL
            return
        again = request.without_pages(
            tokens=[*request.tokens, *([] if first_token is None else [first_token])],
            phase=Phase.FULL,
            num_cached_tokens=0,
            was_looked_up=False,
            released=False,
        )
        self.end(request)
        self.add(again)

    def cancel(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is not None:
            self.end(request)
        for branch in list(self._branches.get(request_id, ())):
            self.finish(branch)

    def cancel_branch(self, request_id: str, branch: int) -> None:
        """End a branch, or mark it as unwanted before it starts."""
        request = self._live.get(request_id)
        if request is not None and not request.has_begun:
            if 0 <= branch < request.sampling.n:
                request.unwanted.add(branch)
            if len(request.unwanted) == request.sampling.n:
                self.end(request)
        elif request is not None and branch == 0:
            self.end(request)
        else:
            for other in [other for other in self._branches.get(request_id, ()) if other.branch == branch]:
                self.finish(other)

    def release(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.advance(RequestState.FINISHED)
            self._give_back(held)
        elif (request := self._live.get(request_id)) is not None and request.phase is not Phase.FULL:
            request.released = True

    def end(self, request: Request) -> None:
        if not request.exposed or request.released:
            self.finish(request)
            return
        self._scheduler.remove(request)
        request.advance(RequestState.HELD)
        del self._live[request.id]
        self._held[request.id] = request

    def finish(self, request: Request) -> None:
        self._scheduler.remove(request)
        request.advance(RequestState.FINISHED)
        self._give_back(request)
        if not request.branch:
            del self._live[request.id]
            return
        branches = self._branches[request.id]
        branches.remove(request)
        if not branches:
            del self._branches[request.id]

    def landed(self, chunk: Chunk) -> None:
        request = chunk.request
        if request.in_flight is not chunk:  # not launched, or already in the next step
            return
        request.in_flight = None
        if request.state is RequestState.FINISHED:
            self._leaving.discard(request)
            self._memory.give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.in_flight is None:
            self._memory.give_back(request)
        else:
            self._leaving.add(request)
