"""Masks for the engine's requests, compiled beside the event loop and the engine, once for each constraint."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from llguidance import LLMatcher, LLTokenizer

from components.errors import MeshError, Rejected
from components.structured.grammar import load_vocabulary, start_matcher
from components.structured.mask import GrammarMask
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint, Sampling

T = TypeVar("T")

THREADS: Final = 2  # one that takes long holds up no other
MAX_KNOWN: Final = 256
MAX_KNOWN_BYTES: Final = 8 << 20


class MaskMaker:
    """Belongs to the event loop. The vocabulary is loaded with the first constraint that comes."""

    def __init__(
        self, folder: Callable[[], Path], vocab_size: int, eos_token_ids: frozenset[int], metrics: ConstraintMetrics
    ) -> None:
        """Masks for an engine of that vocabulary; `folder` finds its model's, on a thread."""
        self._load = lambda: load_vocabulary(folder(), vocab_size, eos_token_ids)
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(THREADS, "constraint")
        self._vocabulary: asyncio.Future[LLTokenizer] | None = None
        self._known: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._known_bytes = 0
        self._starting: dict[Constraint, asyncio.Task[LLMatcher]] = {}

    async def mask_of(self, sampling: Sampling, token_ids: Sequence[int]) -> GrammarMask | None:
        """A mask for one request, at the end of `token_ids`; None without a constraint.

        Raises: Rejected, when there is no such mask: the frontend should have refused it.
        """
        constraint = sampling.constraint
        if constraint is None:
            return None
        started = self._known.get(constraint)
        if started is None:
            started = await asyncio.shield(self._start(constraint))  # others may wait for it too
        else:
            self._known.move_to_end(constraint)
            self._metrics.count("cached")
        vocabulary = await self._tokens()
        mask = GrammarMask(started.deep_copy(), -(-vocabulary.vocab_size // 32))  # some 50 us
        if sampling.num_generated:  # it was moved: 3 us a token
            await self._on_thread(lambda: _replay(mask, token_ids[-sampling.num_generated :]))
        return mask

    def _start(self, constraint: Constraint) -> asyncio.Task[LLMatcher]:
        task = self._starting.get(constraint)
        if task is None:
            task = self._starting[constraint] = asyncio.create_task(self._compile(constraint))
            task.add_done_callback(lambda _: self._starting.pop(constraint))
        return task

    async def _compile(self, constraint: Constraint) -> LLMatcher:
        began = time.perf_counter()
        vocabulary = await self._tokens()
        try:
            matcher = await self._on_thread(lambda: start_matcher(vocabulary, constraint))
            error = matcher.get_error()
        except ValueError as exc:
            error = str(exc)
        self._metrics.count("refused" if error else "compiled", time.perf_counter() - began)
        if error:
            raise Rejected(f"a constraint that cannot be kept: {error}")
        self._known[constraint] = matcher
        self._known_bytes += len(constraint.text)
        while len(self._known) > MAX_KNOWN or self._known_bytes > MAX_KNOWN_BYTES:
            self._known_bytes -= len(self._known.popitem(last=False)[0].text)
        return matcher

    async def _tokens(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = asyncio.ensure_future(self._on_thread(self._load))
        loading = self._vocabulary
        try:
            return await asyncio.shield(loading)
        except (OSError, ValueError, MeshError) as exc:
            if self._vocabulary is loading:
                self._vocabulary = None  # the next one tries again
            raise Rejected(f"this model's tokenizer is of no use for constraints: {exc}") from exc

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _replay(mask: GrammarMask, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        mask.accept(token_id)
