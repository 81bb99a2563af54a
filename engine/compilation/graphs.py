"""CUDA graphs of decode steps for several batch sizes.

A graph reads and writes fixed addresses, which `step_tables` and the buffers here provide.
A step runs in the smallest graph that is large enough, with padding rows of context 0.
Graphs are recorded before the engine serves, because a failed capture would fail the step's requests.
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
    """A backend whose decodes read all changing values from device memory."""

    @property
    def limits(self) -> StepLimits:
        pass

    @property
    def device(self) -> torch.device:
        pass

    def recorded(self, rows: int) -> StepAttention:
        """Return a step of `rows` decodes that reads the tables of the latest plan."""


class CaptureFailed(Exception):
    """Recording failed, but the device still works."""


Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # work → its replay. Raises: CaptureFailed.


class CudaRecorder:
    """Graphs run one at a time, so they share a memory pool."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, which has run before, so that nothing is compiled now.

        Raises: CaptureFailed, after which nothing more may be recorded; torch's error if the device is lost.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local, because other threads copy KV pages
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                work()
        except RuntimeError as exc:
            self._abandon(stream)
            cause = exc.__context__ or exc  # the capture's end raises another error
            raise CaptureFailed(str(cause)) from exc
        return graph.replay

    def _abandon(self, stream: torch.cuda.Stream) -> None:
        """Reset what `torch.cuda.graph` does not if ending the capture fails."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # the capture may have ended
            torch._C._cuda_endAllocateToPool(stream.device_index, self._memory)
        torch.cuda.synchronize()


class DecodeGraphs:
    @torch.inference_mode()  # compilers treat buffers made outside inference mode differently
    def __init__(self, compute: Compute, attention: Recordable, record: Recorder) -> None:
        self._compute = compute
        self._attention = attention
        self._record = record
        self._sizes = graph_sizes(attention.limits.requests)
        self._replays: dict[int, Callable[[], None]] = {}  # by size
        self._logits: torch.Tensor | None = None  # [largest size, vocab]
        device, largest = attention.device, self._sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._keep = torch.arange(largest, device=device)

    @property
    def num_sizes(self) -> int:
        return len(self._sizes)

    def record_all(self, deadline: float, progress: Progress, most: int | None = None) -> int:
        """Record the largest graphs first. Sizes not recorded by `deadline`, or beyond `most`, run in a larger graph.

        Returns: the number of recorded graphs.
        Raises: CaptureFailed.
        """
        self._attention.plan(NO_REQUESTS)  # all rows are padding, so no KV is written
        wanted = self._sizes[::-1][:most]
        for done, size in enumerate(wanted):
            progress(TASK, done, len(wanted))
            if done and monotonic() > deadline:
                break
            if size not in self._replays:
                self._replays[size] = self._recorded(size)
        progress(TASK, len(wanted), len(wanted))
        return len(self._replays)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab] of the R decodes of the latest plan, valid until the next call."""
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
    """Return ascending batch sizes that waste at most 7 rows."""
    sizes = [size for size in (MIN_TOKENS, 4, 8) if size < requests]
    return [*sizes, *range(16, requests, 8), max(MIN_TOKENS, requests)]
