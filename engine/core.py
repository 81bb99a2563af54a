"""The engine without the device: requests in, `StepOutput` out. What computes a step is handed to it as a `Runner`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from types import MappingProxyType
from typing import Protocol

from components.errors import InvariantBroken, PromptTooLong, Rejected, UnknownModel
from components.routing.block_hash import block_hashes, seed_hash
from engine.config import EngineConfig
from engine.kv.events import CacheEvents
from engine.ports import (
    BlockStored,
    Computed,
    EngineRequest,
    Failed,
    FinishReason,
    KvRegion,
    Phase,
    Reserved,
    StepOutput,
    StepStats,
    TokenLogprobs,
    TokenOutput,
)
from engine.sampling.check import check_sampling, check_token_ids
from engine.scheduler.memory import RequestMemory
from engine.scheduler.request import Request, RequestState
from engine.scheduler.scheduler import Chunk, Scheduler

log = logging.getLogger(__name__)


class StepFailed(InvariantBroken):
    """The requests of one step could not be computed; the next step may go well."""


class Runner(Protocol):
    """What computes a step."""

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Write the KV of `chunks` and sample a token for each that `samples`. Raises: StepFailed.

        Log-probabilities that a request asks for are left in its `row`.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's KV of all layers, before the next step."""


class EngineCore:
    """The `Engine` of `engine.ports`: every request from submit to its end, and its pages beyond it."""

    def __init__(
        self,
        *,
        runner: Runner,
        config: EngineConfig,
        region: KvRegion,
        max_context: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._runner = runner
        self._region = region
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._adapters = adapters
        self._events = CacheEvents(config.page_size) if config.kv_events else None
        self._memory = RequestMemory(region.num_pages, config.page_size, config.reserve_tokens, self._events)
        self._scheduler = Scheduler(self._memory, config.max_running, config.max_step_tokens)
        self._live: dict[str, Request] = {}
        self._held: dict[str, Request] = {}  # over, their pages still exposed
        self._branches: dict[str, list[Request]] = {}  # live ones, but for branch 0 of each request
        self._arrivals = count()
        self._step = 0

    @property
    def kv_region(self) -> KvRegion:
        """Where the pages are."""
        return self._region

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens that one request may have."""
        return self._max_context

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters that requests may name, and what identifies the weights of each."""
        return self._adapters

    def peek_prefix(self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "") -> int:
        """Prompt tokens that the prefix cache holds right now. A hint, callable from any thread."""
        page_size = self._region.layout.page_size
        hashes = block_hashes(token_ids[: len(token_ids) - 1], page_size, self._root_hash(cache_salt, adapter))
        return len(self._memory.prefix.match(hashes)) * page_size

    def cached_blocks(self) -> list[BlockStored]:
        """All that the events so far add up to, those not yet told included; empty unless `kv_events` is set."""
        return self._events.blocks() if self._events is not None else []

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises: PromptTooLong, UnknownModel, Rejected.

        A prompt must leave room for one token; an answer that outgrows `max_context` ends there, for length.
        """
        tokens = list(request.token_ids)
        self._check(request, tokens)
        queued = Request(
            id=request.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            limit=min(len(tokens) + request.sampling.max_tokens, self._max_context),
            sampling=request.sampling,
            phase=request.phase,
            arrival=next(self._arrivals),
            root_hash=self._root_hash(request.cache_salt, request.adapter),
            num_generated=request.num_generated,
            eos_token_ids=self._eos_token_ids,
            mask=request.mask,
            priority=request.priority,
            adapter=request.adapter,
        )
        self._live[queued.id] = queued
        self._scheduler.add(queued)

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        """A reserved request's KV has landed: its pages are its own now. Returns its first token.

        Nothing, when the request is no longer reserved: it was cancelled, and its pages still wait for `release`.
        """
        request = self._live.get(request_id)
        if request is None or request.state is not RequestState.RESERVED:
            return []
        check_token_ids([first_token], self._vocab_size, "first_token")
        request.phase = Phase.FULL
        request.num_computed = request.prompt_len
        self._memory.publish(request)
        self._scheduler.start(request)
        self._fork(request)
        finish = self._append(request, first_token)
        if finish is not None:
            self._finish(request)
        cached = request.num_cached_tokens
        return [TokenOutput(request_id, [first_token], finish, cached, 0, None if logprobs is None else [logprobs])]

    def recompute(self, request_id: str) -> None:
        """A DECODE request's KV will not come: queue it as FULL, in its old place; pages that it has stay exposed."""
        request = self._live.get(request_id)
        if request is None or request.phase is not Phase.DECODE:
            return
        if request.state is RequestState.WAITING:  # it has no pages yet, and would be given them for nothing
            request.phase = Phase.FULL
            return
        again = replace(
            request,
            phase=Phase.FULL,
            pages=[],
            num_computed=0,
            num_published=0,
            num_cached_tokens=0,
            released=False,
        )
        self._end(request)
        self._live[request_id] = again
        self._scheduler.add(again)

    def cancel(self, request_id: str) -> None:
        """Stop working on a request; exposed pages wait for `release`. Unknown ids are ignored: it may be over."""
        request = self._live.get(request_id)
        if request is not None:
            self._end(request)
        for branch in list(self._branches.get(request_id, ())):
            self._finish(branch)

    def release(self, request_id: str) -> None:
        """No transfer touches the exposed pages of this request any more: give them back. Unknown ids are ignored.

        When it comes before the request is over, its pages are given back at the end.
        """
        held = self._held.pop(request_id, None)
        if held is not None:
            self._memory.give_back(held)
            held.advance(RequestState.FINISHED)
        elif (request := self._live.get(request_id)) is not None and request.phase is not Phase.FULL:
            request.released = True

    def has_work(self) -> bool:
        """Whether a step would do anything; telling of blocks that came or went between steps is something."""
        return self._scheduler.has_work() or bool(self._events)

    def step(self) -> StepOutput:
        """Run one step: admit, compute one batch, sample. Without work it computes nothing and reports the pool."""
        started = perf_counter()
        self._step += 1
        plan = self._scheduler.schedule()
        output = StepOutput()
        page_size = self._region.layout.page_size
        for request in plan.reserved:
            output.reserved.append(Reserved(request.id, list(request.pages), request.num_computed // page_size))
        prompt_tokens = sum(_prompt_tokens(chunk) for chunk in plan.chunks)
        if plan.chunks:
            try:
                sampled = self._runner.run(plan.chunks)
            except StepFailed as error:
                log.exception("step failed", extra={"requests": len(plan.chunks)})
                output.failed = self._fail(plan.chunks, error)
            else:
                for chunk, token_id in zip(plan.chunks, sampled, strict=True):
                    self._commit(chunk, token_id, output)
        if self._events:
            output.cache_events = self._events.take()
        output.stats = self._stats(output, prompt_tokens, perf_counter() - started)
        return output

    def _commit(self, chunk: Chunk, token_id: int | None, output: StepOutput) -> None:
        """A chunk was computed: account for it, and tell."""
        request = chunk.request
        request.num_computed += chunk.length
        self._memory.publish(request)
        if request.phase is Phase.PREFILL:
            pages, computed, cached = list(request.pages), request.num_computed, request.num_cached_tokens
            if token_id is None:
                output.computed.append(Computed(request.id, pages, computed, cached))
                return
            finish = self._append(request, token_id)
            told = request.row.logprobs, request.row.prompt_logprobs
            output.computed.append(Computed(request.id, pages, computed, cached, token_id, finish, *told))
            self._end(request)
        elif token_id is not None:
            row = request.row
            prompt_logprobs = None
            if len(request.tokens) == request.prompt_len:
                self._fork(request)
                prompt_logprobs = row.prompt_logprobs
            finish = self._append(request, token_id)
            logprobs = None if row.logprobs is None else [row.logprobs]
            cached = request.num_cached_tokens
            output.tokens.append(
                TokenOutput(request.id, [token_id], finish, cached, request.branch, logprobs, prompt_logprobs)
            )
            if finish is not None:
                self._finish(request)

    def _fork(self, request: Request) -> None:
        """The prompt's KV stands and nothing was generated yet: the other branches of the request begin."""
        for number in range(1, request.sampling.n):
            branch = request.forked(number)
            self._branches.setdefault(request.id, []).append(branch)
            pages = self._scheduler.fork(request, branch)
            if pages is not None:
                self._runner.copy_page(*pages)

    def _append(self, request: Request, token_id: int) -> FinishReason | None:
        """Add a generated token; why the request ends with it, if it does."""
        request.tokens.append(token_id)
        if request.mask is not None:
            request.mask.accept(token_id)
        sampling = request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.tokens) >= request.limit else None

    def _fail(self, chunks: Sequence[Chunk], error: StepFailed) -> list[Failed]:
        ids = list(dict.fromkeys(chunk.request.id for chunk in chunks))  # once each, whatever branches there are
        for request_id in ids:
            self.cancel(request_id)
        return [Failed(request_id, InvariantBroken(error.message, request_id=request_id)) for request_id in ids]

    def _end(self, request: Request) -> None:
        """End a live request; pages that a transfer may touch are held."""
        if not request.exposed or request.released:
            self._finish(request)
            return
        self._scheduler.remove(request)
        request.advance(RequestState.HELD)
        del self._live[request.id]
        self._held[request.id] = request

    def _finish(self, request: Request) -> None:
        """End a live request and take its pages."""
        self._scheduler.remove(request)
        self._memory.give_back(request)
        request.advance(RequestState.FINISHED)
        if not request.branch:
            del self._live[request.id]
            return
        branches = self._branches[request.id]
        branches.remove(request)
        if not branches:
            del self._branches[request.id]

    def _check(self, request: EngineRequest, tokens: list[int]) -> None:
        if any(request.request_id in known for known in (self._live, self._held, self._branches)):
            raise Rejected(f"request id {request.request_id!r} is in use", param="request_id")
        if not tokens:
            raise Rejected("a prompt needs at least one token", param="token_ids")
        if len(tokens) >= self._max_context:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; with at least one more to generate, "
                f"this worker takes {self._max_context}",
                prompt_tokens=len(tokens),
                max_context=self._max_context,
            )
        if not 0 <= request.num_generated < len(tokens):
            raise Rejected(
                f"num_generated is {request.num_generated}; it must be from 0 to below the {len(tokens)} tokens given",
                param="num_generated",
            )
        if request.phase is Phase.DECODE and request.sampling.prompt_logprobs is not None:
            raise Rejected("prompt_logprobs come from where the prompt is computed", param="prompt_logprobs")
        check_token_ids(tokens, self._vocab_size, "token_ids")
        check_sampling(request.sampling, self._vocab_size, self._eos_token_ids, request.num_generated)

    def _root_hash(self, cache_salt: str, adapter: str) -> bytes:
        """By what an adapter is, not by its name: that may mean other weights elsewhere."""
        if adapter and adapter not in self._adapters:
            there = ", ".join(sorted(self._adapters)) or "none"
            raise UnknownModel(f"there is no LoRA adapter {adapter!r}; loaded here: {there}", param="model")
        return seed_hash(self._region.layout.model, self._adapters.get(adapter, ""), cache_salt)

    def _stats(self, output: StepOutput, prompt_tokens: int, step_s: float) -> StepStats:
        scheduler, pool = self._scheduler, self._memory.pool
        sampled = len(output.tokens) + sum(1 for c in output.computed if c.first_token is not None)
        return StepStats(
            step=self._step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_reserved=len(scheduler.reserved),
            num_held=len(self._held),
            prompt_tokens=0 if output.failed else prompt_tokens,
            decode_tokens=sampled,
            free_pages=pool.num_free,
            cached_pages=pool.num_cached,
            held_pages=pool.num_held,
            total_pages=pool.num_pages,
            step_s=step_s,
            prefix_queries=self._memory.prefix_queries,
            prefix_hits=self._memory.prefix_hits,
            retractions=scheduler.retractions,
        )


def _prompt_tokens(chunk: Chunk) -> int:
    """Tokens of the chunk that belong to the prompt; the rest were generated before, here or elsewhere."""
    request = chunk.request
    return max(0, min(request.num_computed + chunk.length, request.prompt_len) - request.num_computed)
