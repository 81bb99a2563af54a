"""CUDA graphs of decode steps, one for each of some batch sizes: a step of hundreds of kernels is launched at once.

A graph reads and writes the same addresses at each replay. So tokens and positions are copied into buffers of ours, the
step's tables stand where attention keeps them for good (`engine.attention.step_tables`), and logits appear in the
graph's own memory. A step runs in the smallest graph that holds it; rows beyond its requests are padding, which attention
knows by its context of 0.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple, Protocol, runtime_checkable

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


class Recording(NamedTuple):
    """Work that was recorded, and where its result appears."""

    replay: Callable[[], None]
    logits: torch.Tensor


Recorder = Callable[[Callable[[], torch.Tensor]], Recording]


class CudaRecorder:
    """Records on the current device; all graphs share one pool of memory, because no two of them run at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Recording:
        """Record `work`, which has run before: nothing may be compiled or loaded meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of this process move KV pages, and may go on doing so
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = work()
        return Recording(graph.replay, logits)


class DecodeGraphs:
    """Decode steps of up to `attention.limits.requests` requests through `compute`, recorded when first needed."""

    @torch.inference_mode()  # to a compiler, buffers made outside it would be other kinds of tensors than a step's
    def __init__(self, compute: Compute, attention: Recordable, record: Recorder) -> None:
        self._compute = compute
        self._attention = attention
        self._record = record
        self._sizes = graph_sizes(attention.limits.requests)
        self._recordings: dict[int, Recording] = {}
        device, largest = attention.device, self._sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._keep = torch.arange(largest, device=device)

    def record_all(self, deadline: float, progress: Progress) -> None:
        """Record the largest size first: whatever is missing when time is up runs in a larger one."""
        self._attention.plan(NO_REQUESTS)  # all rows are padding: no KV is written
        for done, size in enumerate(reversed(self._sizes)):
            progress(TASK, done, len(self._sizes))
            if done and monotonic() > deadline:
                break
            self._recording(size)
        progress(TASK, len(self._sizes), len(self._sizes))

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of the step of R decodes planned last; they stand until the next call."""
        count = len(token_ids)
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        replay, logits = self._recording(next(size for size in self._sizes if size >= count))
        replay()
        return logits[:count]

    def _recording(self, size: int) -> Recording:
        """In the midst of a step it first computes that step: the replay writes the same KV to the same slots."""
        if size not in self._recordings:
            step = self._attention.recorded(size)
            inputs = self._token_ids[:size], self._positions[:size], self._keep[:size]

            def work() -> torch.Tensor:
                with attending(step, size):
                    return self._compute(*inputs)

            work()
            self._recordings[size] = self._record(work)
        return self._recordings[size]


def graph_sizes(requests: int) -> list[int]:
    """Batch sizes, ascending: doubling, then in steps of 8, so that a step computes at most 7 rows for nothing."""
    sizes = [size for size in (MIN_TOKENS, 4, 8) if size < requests]
    return [*sizes, *range(16, requests, 8), max(MIN_TOKENS, requests)]
