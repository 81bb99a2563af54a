"""CUDA graphs of decode steps, one for each of some batch sizes: a step of hundreds of kernels is launched at once.

A graph reads and writes the same addresses at each replay. So tokens and positions are copied into buffers of ours, the
step's tables stand where attention keeps them for good (`engine.attention.step_tables`), and all graphs write their logits
into one buffer. A step runs in the smallest graph that holds it; rows beyond its requests are padding, which attention
knows by its context of 0.

Graphs are recorded before the engine serves: a capture that fails in the midst of a step would take its requests with it.
"""

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol, runtime_checkable

import torch

from engine.attention.backend import AttentionBackend, StepAttention, StepShape
from engine.attention.opaque import attending
from engine.attention.step_tables import StepLimits
from engine.compilation.forward import MIN_TOKENS
from engine.model.progress import Progress

TASK: Final = "Recording CUDA graphs"
NO_REQUESTS: Final = StepShape([], [], [])

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # token ids, positions, kept → logits


@runtime_checkable
class Recordable(AttentionBackend, Protocol):
    """A backend whose decode kernels may be recorded: what changes from step to step stands in device memory."""

    @property
    def limits(self) -> StepLimits:
        """What no step exceeds."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def recorded(self, rows: int) -> StepAttention:
        """Attention of `rows` decodes that reads, whenever it runs, the tables of the step planned last."""


class CaptureFailed(Exception):
    """Work cannot be recorded; the device still computes. The message says why."""


Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # work → what does it again. Raises: CaptureFailed.


class CudaRecorder:
    """Records on the current device; all graphs share one pool of memory, because no two of them run at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, which has run before: nothing may be compiled or loaded meanwhile.

        Raises: CaptureFailed, and no more may be recorded then. A device that is lost raises what torch raises.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local: other threads of this process move KV pages, and may go on doing so
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                work()
        except RuntimeError as exc:
            self._abandon(stream)
            raise CaptureFailed(str(exc.__context__ or exc)) from exc  # the end of a broken capture fails, too
        return graph.replay

    def _abandon(self, stream: torch.cuda.Stream) -> None:
        """Undo what `torch.cuda.graph` leaves when its end fails: its own stream, and its memory for all that is allocated."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it may have come to that
            torch._C._cuda_endAllocateToPool(stream.device_index, self._memory)
        torch.cuda.synchronize()


class DecodeGraphs:
    """Decode steps of up to `attention.limits.requests` requests through `compute`."""

    @torch.inference_mode()  # to a compiler, buffers made outside it would be other kinds of tensors than a step's
    def __init__(self, compute: Compute, attention: Recordable, record: Recorder) -> None:
        self._compute = compute
        self._attention = attention
        self._record = record
        self._sizes = graph_sizes(attention.limits.requests)
        self._replays: dict[int, Callable[[], None]] = {}  # by size
        self._logits: torch.Tensor | None = None  # [largest size, vocab], once a step has shown their dtype
        device, largest = attention.device, self._sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._keep = torch.arange(largest, device=device)

    def record_all(self, deadline: float, progress: Progress) -> None:
        """Record the largest size first: whatever is missing when time is up runs in a larger one. Raises: CaptureFailed."""
        self._attention.plan(NO_REQUESTS)  # all rows are padding: no KV is written
        for done, size in enumerate(reversed(self._sizes)):
            progress(TASK, done, len(self._sizes))
            if done and monotonic() > deadline:
                break
            if size not in self._replays:
                self._replays[size] = self._recorded(size)
        progress(TASK, len(self._sizes), len(self._sizes))

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of the step of R decodes planned last; they stand until the next call."""
        count = len(token_ids)
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._replays[min(size for size in self._replays if size >= count)]()
        assert self._logits is not None
        return self._logits[:count]

    def _recorded(self, size: int) -> Callable[[], None]:
        step = self._attention.recorded(size)
        inputs = self._token_ids[:size], self._positions[:size], self._keep[:size]

        def work() -> None:
            with attending(step, size):
                logits = self._compute(*inputs)
            if self._logits is None:
                self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
            self._logits[:size].copy_(logits)

        try:
            work()
        except torch.OutOfMemoryError as exc:
            raise CaptureFailed(str(exc)) from exc
        return self._record(work)


def graph_sizes(requests: int) -> list[int]:
    """Batch sizes, ascending: doubling, then in steps of 8, so that a step computes at most 7 rows for nothing."""
    sizes = [size for size in (MIN_TOKENS, 4, 8) if size < requests]
    return [*sizes, *range(16, requests, 8), max(MIN_TOKENS, requests)]
