"""The engine without the device.

With `pipeline`, a step is planned and launched while the previous one runs, and a decode may read its last token on the
device. Draws wait for the previous step, because penalties and masks need the whole text. A request skips a step if the
token in flight is its last, or if branches fork there. If a request ends meanwhile, its draw is dropped. No request is
preempted while a step is in flight. Without `pipeline`, a step lands before the next one is planned.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import count
from time import perf_counter, sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from components.errors import InvariantBroken, UnknownModel
from components.wire.layout import KvRegion
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from components.wire.step_stats import StepStats
from components.wire.tokens import PromptBlocks, seed_hash
from engine.config import EngineConfig
from engine.core.open_requests import Limits, Requests
from engine.core.outcomes import FailedSteps, Outcomes
from engine.kv.page_store import Staging
from engine.model.pooling import Pooling
from engine.ports import (
    EngineRequest,
    Exposed,
    Failed,
    Pause,
    Recording,
    StepOutput,
    TokenOutput,
)
from engine.runner.step_runner import Launched, Runner, StepFailed
from engine.sampling.row import is_penalised
from engine.scheduler.request import Chunk, Drafter, Request, RequestMemory, usable_pages
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_cost import ChunkLimit, RowCost

if TYPE_CHECKING:  # the mock engine starts without torch
    from engine.cpu.step_threads import StepThreads

log = logging.getLogger(__name__)

PACK_TOKENS: Final = 1536  # enough to keep a device busy
CPU_ITL_TARGET_MS: Final = 50.0
# Decodes and drafts in a step. A CPU multiplies weights by twelve rows at a time (linear.cpp); the GPU's number is a guess.
CPU_DRAFT_ROWS: Final = 12
GPU_DRAFT_ROWS: Final = 64
CPU_STRETCH: Final = 4.0  # factor by which a prompt chunk may lengthen a decode step if no target is set
CPU_OVERRUN: Final = 1.5  # factor by which a chunk may exceed its limit then, to complete its prompt


class EngineCore:
    """Implements `engine.ports.Engine`; a `Runner` computes the steps."""

    def __init__(
        self,
        *,
        runner: Runner,
        threads: "StepThreads | None" = None,
        config: EngineConfig,
        region: KvRegion,
        max_context: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        adapters: Mapping[str, str] = MappingProxyType({}),
        pooling: Pooling | None = None,
        pack_tokens: int = PACK_TOKENS,
        window: int = 0,
        num_offloaded: int = 0,
        staging: Staging | None = None,
        make_drafter: Callable[[Sequence[int], Sequence[int]], Drafter] | None = None,
    ) -> None:
        """Create an engine without requests.

        Args:
            threads: of `runner`'s steps on a CPU; None: their number does not change.
            window: maximum number of keys that a layer reads, including the token's own; 0: all.
            num_offloaded: evicted pages that `runner` can keep; their ids follow those of `region`.
            staging: for pages in files; the ids of its slots follow those of evicted pages; None: no files.
            make_drafter: called with the growing text of a request and its prediction; None: no speculative decoding.
        """
        self.kv_region = region
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.adapters = adapters
        self.embedding = None if pooling is None else pooling.about
        self._runner = runner
        self._threads = threads
        self._pools_all = pooling is not None and pooling.reads_all
        self._limits = Limits(max_context, vocab_size, eos_token_ids, embeds=pooling is not None)
        self._make_drafter = make_drafter
        self._always_drafts = config.speculative_tokens is not None  # otherwise only if `drafts_are_cheap`
        auto = not runner.takes_cpu and make_drafter is None  # a draft needs the token that the step in flight draws
        self._pipelined = config.pipeline == "on" or (config.pipeline == "auto" and auto)
        self._memory = RequestMemory(
            region.num_pages,
            config.page_size,
            config.reserve_tokens,
            self._copy_pages,
            num_offloaded=num_offloaded,
            staging=staging,
            window=window if window < max_context else 0,
            kv_events=config.kv_events,
        )
        size = config.step_size(region.device)
        # on a GPU, memory was measured with max_running draws; a few more make no difference
        draft_rows = CPU_DRAFT_ROWS if runner.takes_cpu else min(GPU_DRAFT_ROWS, max(CPU_DRAFT_ROWS, size.requests))
        self._scheduler = Scheduler(
            self._memory, size.requests, size.tokens, config.pack_tokens or pack_tokens, draft_rows
        )
        self._requests = Requests(self._scheduler, self._memory)
        self._outcomes = Outcomes(self._requests, self._scheduler, self._memory, self._limits)
        self._admission_copies = num_offloaded > 0 or staging is not None
        self._flight: Launched | None = None  # step whose tokens are drawn, but have not landed
        self._behind: Launched | None = None  # step whose tokens are not drawn yet
        self._failed_steps = FailedSteps()
        self._chunk_limit: ChunkLimit | None = None
        if config.itl_target_ms:
            self._chunk_limit = ChunkLimit(config.itl_target_ms / 1000)
        elif config.itl_target_ms is None and runner.takes_cpu:
            self._chunk_limit = ChunkLimit(CPU_ITL_TARGET_MS / 1000, CPU_STRETCH, CPU_OVERRUN)
        self._row_cost = None if make_drafter is None else RowCost()
        self._arrivals = count()
        self._step = 0
        # counts of the steps that landed during this one
        self._prompt_tokens = 0
        self._prompt_rows = 0  # including tokens that are computed again
        self._decodes = 0
        self._decode_rows = 0  # rows of decodes and drafts
        self._copied_s = 0.0  # time of this step for copies of pages, and for files

    def prompt_blocks(self, token_ids: bytes, cache_salt: str = "", adapter: str = "") -> PromptBlocks:
        return PromptBlocks(token_ids, self._root_hash(cache_salt, adapter))

    def peek_prefix(self, blocks: PromptBlocks) -> int:
        page_size = self.kv_region.layout.page_size
        return self._memory.num_cached(blocks(page_size)[: usable_pages(blocks.num_tokens, page_size)])

    def continues(self, num_tokens: int, sampling: SamplingParams, first_token: int) -> bool:
        ends = num_tokens + 1 >= self._limits.length(num_tokens, sampling) or self._limits.stops(sampling, first_token)
        return 0 <= first_token < self.vocab_size and not ends

    def submit(self, request: EngineRequest) -> None:
        tokens = list(request.token_ids)
        self._limits.check(request, tokens, self._requests)
        queued = Request(
            id=request.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            limit=self._limits.length(len(tokens), request.sampling),
            sampling=request.sampling,
            phase=request.phase,
            arrival=next(self._arrivals),
            root_hash=self._root_hash(request.cache_salt, request.adapter),
            hashes=[] if request.blocks is None else request.blocks(self.kv_region.layout.page_size)[:],
            num_generated=request.num_generated,
            eos_token_ids=self.eos_token_ids,
            mask=request.mask,
            priority=request.priority,
            adapter=request.adapter,
            pools_all=self._pools_all,
            make_drafter=self._drafter_of(request),
        )
        self._requests.add(queued)

    def _drafter_of(self, request: EngineRequest) -> Callable[[Sequence[int]], Drafter] | None:
        make_drafter = self._make_drafter
        if make_drafter is None or not (self._always_drafts or drafts_are_cheap(request)):
            return None
        return lambda tokens: make_drafter(tokens, request.prediction)

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        return self._outcomes.deliver(request_id, first_token, logprobs)

    def recompute(self, request_id: str, first_token: int | None = None) -> None:
        self._requests.recompute(request_id, first_token)

    def cancel(self, request_id: str, branch: int | None = None) -> None:
        if branch is None:
            self._requests.cancel(request_id)
        else:
            self._requests.cancel_branch(request_id, branch)

    def release(self, request_id: str) -> None:
        self._requests.release(request_id)

    def wait_s(self) -> float:
        if self._threads is None or not self._scheduler.computes():
            return 0
        return self._threads.wait_s(prompts=self._scheduler.has_prompts())

    def rest(self) -> None:
        if self._threads is not None:
            self._threads.rest()

    def start_profile(self, facts: Mapping[str, str]) -> None:
        self._runner.start_profile(facts)

    def stop_profile(self) -> Recording:
        return self._runner.stop_profile()

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        self._runner.on_loss(callback)

    def close(self) -> None:
        if self._memory.store is not None:
            self._memory.store.close()
        self._runner.close()

    def has_work(self) -> bool:
        waits = self._scheduler.has_work() or self._memory.can_save()
        return waits or self._flight is not None or bool(self._memory.prefix.events)

    def computes(self) -> bool:
        if self._flight is not None or self._scheduler.computes() or self._memory.can_save():
            return True
        return self._admission_copies and self._scheduler.would_reserve()

    def step(self) -> StepOutput:
        (output,) = self._stepping(pauses=False)
        assert isinstance(output, StepOutput)
        return output

    def stepping(self) -> Iterator[Pause | StepOutput]:
        return self._stepping(pauses=True)

    def _stepping(self, *, pauses: bool) -> Iterator[Pause | StepOutput]:
        try:
            output = yield from self._stepped(pauses=pauses)
        finally:
            if self._threads is not None:
                self._threads.done()
        yield output

    def _stepped(self, *, pauses: bool) -> Generator[Pause, None, StepOutput]:
        started = perf_counter()
        self._step += 1
        self._prompt_tokens = self._prompt_rows = self._decodes = self._decode_rows = 0
        self._copied_s = 0.0
        store = self._memory.store
        loading_s = 0.0 if store is None else store.loading_s
        output = StepOutput()
        if self._scheduler.must_preempt():
            if pauses:
                yield from self._pauses(output, reserve=False)  # there are too few pages
            self._commit_flight(output)
        beside = None if self._chunk_limit is None else self._chunk_limit.tokens
        least_chance = None if self._row_cost is None else self._row_cost.least_chance
        chunks, reserved = self._scheduler.schedule(beside, least_chance)
        output.reserved += _reserved(reserved)
        self._behind = self._launch(chunks, output)
        if pauses:
            yield from self._pauses(output)
        self._commit_flight(output)
        self._behind, behind = None, self._behind
        self._flight = self._sample(behind, output)
        if not self._pipelined:
            if pauses:
                yield from self._pauses(output)
            self._commit_flight(output)
        self._failed_steps.check()
        if store is not None:
            store.save()
            self._copied_s += store.loading_s - loading_s
        output.cache_events = self._memory.prefix.take_events()
        output.stats = stats = self._stats(output, perf_counter() - started)
        computed_s = stats.step_s - self._copied_s
        if self._row_cost is not None and self._decodes and not self._prompt_rows:
            self._row_cost.stepped(self._decode_rows, computed_s)
            computed_s = self._row_cost.without_drafts_s(self._decodes, self._decode_rows, computed_s)
        if self._chunk_limit is not None:
            self._chunk_limit.stepped(self._prompt_rows, self._decodes, computed_s)
        return output

    def _copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        started = perf_counter()
        self._runner.copy_pages(moves)
        self._copied_s += perf_counter() - started

    def _launch(self, chunks: list[Chunk], output: StepOutput) -> Launched | None:
        if not chunks:
            return None
        if self._threads is not None:
            prompts = any(chunk.is_prompt for chunk in chunks)
            while wait_s := self._threads.wait_s(prompts=prompts):
                sleep(wait_s)
        try:
            launched = self._runner.launch(chunks)
        except StepFailed as error:
            self._fail(error, chunks, output)
            return None
        for chunk in chunks:
            chunk.request.in_flight = chunk
        return launched

    def _sample(self, launched: Launched | None, output: StepOutput) -> Launched | None:
        if launched is None:
            return None
        try:
            launched.sample()
        except StepFailed as error:
            self._fail(error, launched.chunks, output)
            return None
        return launched

    def _pauses(self, output: StepOutput, *, reserve: bool = True) -> Iterator[Pause]:
        while self._flight is not None and (wait_s := self._flight.wait_s()):
            reserved, output.reserved = output.reserved, []
            yield Pause(reserved, wait_s)
            if reserve:
                output.reserved += _reserved(self._scheduler.reserve())

    def _commit_flight(self, output: StepOutput) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            sampled = flight.result()
        except StepFailed as error:
            self._fail(error, flight.chunks, output)
            return
        self._failed_steps.landed()
        for chunk, drawn in zip(flight.chunks, sampled, strict=True):
            request, start = chunk.request, chunk.start
            if chunk.is_prompt:
                self._prompt_rows += chunk.length
            else:
                self._decodes += 1
                self._decode_rows += chunk.length
            if start < request.prompt_len:
                self._prompt_tokens += min(chunk.end, request.prompt_len) - start
            if request.in_flight is chunk:  # otherwise the request is already in the next step
                self._requests.landed(chunk)
            if not chunk.dropped:
                self._outcomes.commit(chunk, drawn, output)

    def _fail(self, error: StepFailed, chunks: Sequence[Chunk], output: StepOutput) -> None:
        log.error("step failed", exc_info=error, extra={"requests": len(chunks)})
        self._commit_flight(output)  # if a launch failed, the previous step is still in flight
        self._failed_steps.failed((chunk.request for chunk in chunks), error.message)
        for chunk in chunks:
            self._requests.landed(chunk)
        ids = dict.fromkeys(chunk.request.id for chunk in chunks if not chunk.dropped)  # once, with all branches
        for request_id in ids:
            self._requests.cancel(request_id)
            output.failed.append(Failed(request_id, InvariantBroken(error.message, request_id=request_id)))

    def _root_hash(self, cache_salt: str, adapter: str) -> bytes:
        if adapter and adapter not in self.adapters:
            there = ", ".join(sorted(self.adapters)) or "none"
            raise UnknownModel(f"there is no LoRA adapter {adapter!r}; loaded here: {there}", param="model")
        return seed_hash(self.kv_region.layout.model, self.adapters.get(adapter, ""), cache_salt)

    def _stats(self, output: StepOutput, step_s: float) -> StepStats:
        scheduler, pool, store = self._scheduler, self._memory.pool, self._memory.store
        sampled = sum(len(tokens.token_ids) for tokens in output.tokens)
        if output.computed:
            sampled += sum(1 for computed in output.computed if computed.first_token is not None)
        return StepStats(
            step=self._step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_reserved=len(scheduler.reserved),
            num_held=self._requests.num_held,
            prompt_tokens=self._prompt_tokens,
            decode_tokens=sampled,
            free_pages=pool.num_free,
            cached_pages=pool.num_cached,
            held_pages=pool.num_held,
            total_pages=pool.num_pages,
            step_s=step_s,
            prefix_queries=self._memory.prefix_queries,
            prefix_hits=self._memory.prefix_hits,
            offloaded_pages=len(self._memory.offloaded),
            restored_pages=self._memory.offloaded.num_restored,
            loaded_pages=0 if store is None else store.num_loaded,
            saved_pages=0 if store is None else store.num_saved,
            unsaved_pages=0 if store is None else store.num_unsaved,
            preemptions=scheduler.preemptions,
            drafted_tokens=self._outcomes.draft_counts.checked,
            accepted_tokens=self._outcomes.draft_counts.accepted,
            forward=self._runner.forward_kind,
        )


def _reserved(requests: Sequence[Request]) -> list[Exposed]:
    return [Exposed(r.id, list(r.pages), r.num_computed, r.num_cached_tokens) for r in requests]


def drafts_are_cheap(request: EngineRequest) -> bool:
    """Return whether drafts cost nothing beyond the computation of their rows.

    Drafts use up the limit of a compiled grammar, which its requests share. Penalties count the text again for each draft.
    """
    return request.mask is None and not is_penalised(request.sampling)
