"""Compiles each constraint once for many requests, in threads."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

from llguidance import LLMatcher, LLTokenizer

from components.errors import MeshError, Overloaded, Rejected
from components.structured.grammar import load_vocabulary, start_matcher
from components.structured.mask import GrammarMask, Wear
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint

T = TypeVar("T")


class Threads:
    """A pool of daemon threads, because `ThreadPoolExecutor` would wait for running work at exit."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._stopped = False

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work`. If cancelled before it starts, it never runs.

        Raises: Overloaded after `stop`.
        """
        if self._stopped:
            raise Overloaded("this process is leaving")
        if self._threads[0].ident is None:
            for thread in self._threads:
                thread.start()
        future: Future[T] = Future()
        self._work.put((future, work))
        return asyncio.wrap_future(future)

    async def stop(self, patience_s: float) -> None:
        """Cancel queued work, and wait at most `patience_s` for running work."""
        self._stopped = True
        try:
            while (waiting := self._work.get_nowait()) is not None:
                waiting[0].cancel()
        except Empty:
            pass
        for _ in self._threads:
            self._work.put(None)
        await asyncio.to_thread(self._join, time.monotonic() + patience_s)

    def _join(self, until_s: float) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (taken := self._work.get()) is not None:
            future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - the caller gets it; a panic of Rust's is not an Exception
                future.set_exception(exc)
            del taken, future, work  # else an idle thread keeps them alive


THREADS: Final = 2  # so that a slow compilation does not block others
STOP_S: Final = 2.0  # for running compilations when the process ends
MAX_KNOWN: Final = 128
MAX_KNOWN_BYTES: Final = 512 << 20  # estimated, because llguidance does not report its memory
# upper bounds; docs/openai.md has the figures
BYTES_PER_CPU_S: Final = 160e6  # per CPU second of compiling
BYTES_PER_TOKEN: Final = 24e3
MAX_TOKENS: Final = 1024  # then later requests compile it again


@dataclass(slots=True, eq=False)
class _Compiled:
    matcher: LLMatcher
    cpu_s: float
    num_words: int
    wear: Wear = field(default_factory=Wear)

    @property
    def num_bytes(self) -> float:
        return BYTES_PER_CPU_S * self.cpu_s + BYTES_PER_TOKEN * self.wear.num_tokens

    @property
    def is_worn(self) -> bool:
        return self.wear.has_failed or self.wear.num_tokens >= MAX_TOKENS

    def mask(self) -> GrammarMask:
        """A mask for one request; takes about 50 us."""
        return GrammarMask(self.matcher.deep_copy(), self.num_words, self.wear)


class MaskMaker:
    """Use it only on the event loop."""

    def __init__(
        self, folder: Callable[[], Path], vocab_size: int, eos_token_ids: frozenset[int], metrics: ConstraintMetrics
    ) -> None:
        """`folder`: returns the model's directory; called on a thread."""
        self._load = lambda: load_vocabulary(folder(), vocab_size, eos_token_ids)
        self._metrics = metrics
        self._threads = Threads(THREADS, "constraint")
        self._vocabulary: asyncio.Future[LLTokenizer] | None = None
        self._known: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._starting: dict[Constraint, asyncio.Task[_Compiled]] = {}

    async def mask_of(self, constraint: Constraint, token_ids: Sequence[int], num_generated: int = 0) -> GrammarMask:
        """`token_ids`: the text so far, of which the last `num_generated` belong to the answer.

        Raises: Rejected, although the frontend should have refused the constraint.
        """
        compiled = self._recall(constraint)
        if compiled is None:
            compiled = await asyncio.shield(self._start(constraint))  # other requests may also wait for it
        mask = compiled.mask()
        if num_generated:  # a moved stream; 3 us per token
            await self._threads.do(lambda: _replay(mask, token_ids[-num_generated:]))
        return mask

    async def aclose(self) -> None:
        for task in self._starting.values():
            task.cancel()
        await self._threads.stop(STOP_S)
        if self._vocabulary is not None:
            self._vocabulary.cancel()

    def _recall(self, constraint: Constraint) -> _Compiled | None:
        compiled = self._known.get(constraint)
        if compiled is None:
            return None
        if compiled.is_worn:
            del self._known[constraint]
            return None
        self._known.move_to_end(constraint)
        self._forget()  # all of them may have grown
        self._metrics.count("cached")
        return compiled

    def _start(self, constraint: Constraint) -> asyncio.Task[_Compiled]:
        task = self._starting.get(constraint)
        if task is None:
            task = self._starting[constraint] = asyncio.create_task(self._compile(constraint))
            task.add_done_callback(lambda _: self._starting.pop(constraint))
        return task

    async def _compile(self, constraint: Constraint) -> _Compiled:
        began = time.perf_counter()
        vocabulary = await self._tokens()
        try:
            matcher, cpu_s = await self._threads.do(lambda: _timed(vocabulary, constraint))
            error = matcher.get_error()
        except ValueError as exc:
            error = str(exc)
        self._metrics.count("refused" if error else "compiled", time.perf_counter() - began)
        if error:
            raise Rejected(f"the constraint cannot be used: {error}")
        compiled = self._known[constraint] = _Compiled(matcher, cpu_s, -(-vocabulary.vocab_size // 32))
        self._forget()
        return compiled

    def _forget(self) -> None:
        """Evict the least recently used beyond the limits. Requests keep their masks."""
        num_bytes = sum(compiled.num_bytes for compiled in self._known.values())
        while self._known and (len(self._known) > MAX_KNOWN or num_bytes > MAX_KNOWN_BYTES):
            num_bytes -= self._known.popitem(last=False)[1].num_bytes

    async def _tokens(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = self._threads.do(self._load)
        loading = self._vocabulary
        try:
            return await asyncio.shield(loading)
        except (OSError, ValueError, MeshError) as exc:
            if self._vocabulary is loading:
                self._vocabulary = None
            raise Rejected(f"this model's tokenizer does not support constraints: {exc}") from exc


def _timed(vocabulary: LLTokenizer, constraint: Constraint) -> tuple[LLMatcher, float]:
    began = time.thread_time()
    return start_matcher(vocabulary, constraint), time.thread_time() - began


def _replay(mask: GrammarMask, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        mask.accept(token_id)


@asynccontextmanager
async def open_masks(
    folder: Callable[[], Path], vocab_size: int, eos_token_ids: frozenset[int], metrics: ConstraintMetrics
) -> AsyncIterator[MaskMaker]:
    async with contextlib.aclosing(MaskMaker(folder, vocab_size, eos_token_ids, metrics)) as maker:
        yield maker
