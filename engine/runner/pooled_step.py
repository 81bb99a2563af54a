"""A step of an embedding model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from engine.device.copies import Arrival, to_host
from engine.model.pooling import Pooling
from engine.sampling.row import NO_TOKEN
from engine.scheduler.request import Chunk, Request


class PooledStep:
    """Implements `engine.runner.step_runner.Launched`; only `result` waits for the device.

    Args:
        failing: as `TorchRunner.failing`.
        ordered: `chunks` in `StepShape`'s order.
        wanted: number of last tokens of each chunk in `hidden`, in that order.
        hidden: float32 [sum(wanted), size].
    """

    def __init__(
        self,
        failing: Callable[[int], AbstractContextManager[None]],
        chunks: Sequence[Chunk],
        ordered: Sequence[Chunk],
        wanted: Sequence[int],
        hidden: torch.Tensor,
        *,
        pooling: Pooling,
    ) -> None:
        self._failing = failing
        self.chunks = chunks
        self._ordered = ordered
        self._wanted = wanted
        self._hidden: torch.Tensor | None = hidden
        self._pooling = pooling
        self._vectors: list[tuple[Request, torch.Tensor]] = []

    @torch.inference_mode()
    def sample(self) -> None:
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "a step is sampled once"
        with self._failing(len(self._ordered)):
            for chunk, rows in zip(self._ordered, torch.split(hidden, list(self._wanted)), strict=True):
                if not chunk.dropped:
                    self._pool(chunk, rows)
            self._arrival = Arrival(hidden.device)

    def wait_s(self) -> float:
        return self._arrival.wait_s()

    def result(self) -> Sequence[Sequence[int]]:
        self._arrival.wait()
        broken: set[Request] = set()
        with self._failing(len(self._ordered)):
            for request, vector in self._vectors:
                request.vector = vector.numpy().astype("<f4").tobytes()
                if not vector.isfinite().all():
                    broken.add(request)
        return [(NO_TOKEN,) if chunk.request in broken else () for chunk in self.chunks]

    def _pool(self, chunk: Chunk, rows: torch.Tensor) -> None:
        request = chunk.request
        match self._pooling.mode:
            case "mean":
                # fp32, in token order, so that chunk boundaries change only the last bits
                request.hidden = rows.sum(0) if request.hidden is None else request.hidden + rows.sum(0)
            case "cls" if chunk.start == 0:
                request.hidden = rows[0].clone()
            case "last" if chunk.samples:
                request.hidden = rows[-1]
        if not chunk.samples:
            return
        vector = request.hidden / chunk.end if self._pooling.mode == "mean" else request.hidden
        request.hidden = None
        if self._pooling.about.normalised:
            vector = torch.nn.functional.normalize(vector, dim=0)
        self._vectors.append((request, to_host(vector)))
