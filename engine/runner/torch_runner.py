"""Computes a step on the device, from chunks to sampled tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

import torch

from components.wire.sampling import SamplingParams
from engine.device.copies import Arrival, to_device
from engine.model.pooling import Pooling
from engine.runner.device_model import StepModel
from engine.runner.pooled_step import PooledStep
from engine.runner.step_inputs import inputs_of
from engine.runner.step_runner import StepFailed
from engine.runner.torch_profile import Profile, Recording
from engine.sampling.logprobs import PromptLogprobs
from engine.sampling.row import NO_TOKEN, Row
from engine.sampling.sampler import Draw, Sampler, choose_sampler
from engine.scheduler.request import Chunk, Request

DROPPED: Final = Row(SamplingParams(max_tokens=1, temperature=0), [], 0)  # for a request that has ended


class TorchRunner:
    """Implements `engine.runner.step_runner.Runner` with torch.

    Args:
        pooling: of an embedding model, which computes hidden states.
    """

    def __init__(self, model: StepModel, *, pooling: Pooling | None = None) -> None:
        self._pooling = pooling
        self._model = model
        self._device = model.device
        self.sampler: Sampler = choose_sampler(model.device)
        self._profile: Profile | None = None
        self._drawn_ids = torch.empty(0)  # int64 [S] on the device, of the latest draw
        self._drawn_for: dict[Request, int] = {}  # index in `_drawn_ids`

    @property
    def takes_cpu(self) -> bool:
        return self._device.type == "cpu"

    @property
    def forward_kind(self) -> str:
        return self._model.forward_kind

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> "TorchStep | PooledStep":
        """Raises: StepFailed; for a lost device what torch raises."""
        ordered = sorted(chunks, key=lambda chunk: (chunk.length > 1, chunk.end))
        wanted = [chunk.length if chunk.request.reads_prompt else len(chunk.rows) for chunk in ordered]
        marked = self._profile.step(chunks) if self._profile is not None else nullcontext()
        with self.failing(len(chunks)), marked:
            logits = self._model.compute(inputs_of(ordered, wanted), self._ahead_ids(ordered))
            if self._pooling is not None:
                return PooledStep(self.failing, chunks, ordered, wanted, logits.float(), pooling=self._pooling)
            return TorchStep(self, chunks, ordered, wanted, logits)

    @torch.inference_mode()
    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        self._model.copy_pages(moves)

    def start_profile(self, facts: Mapping[str, str]) -> None:
        self._profile = Profile(self._device, facts)

    def stop_profile(self) -> Recording:
        assert self._profile is not None, "no profile was started"
        stopping, self._profile = self._profile, None
        return stopping.stop()

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        self._model.on_loss(callback)

    def close(self) -> None:
        self._model.close()

    def drawn(self, requests: Sequence[Request], token_ids: torch.Tensor) -> None:
        self._drawn_ids = token_ids
        self._drawn_for = {request: i for i, request in enumerate(requests)}

    @contextmanager
    def failing(self, num_requests: int) -> Iterator[None]:
        try:
            yield
        except torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError, IndexError, MemoryError) as exc:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            raise StepFailed(f"computing a step of {num_requests} requests failed: {exc}") from exc

    def _ahead_ids(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        drawn = [self._drawn_for[chunk.request] for chunk in chunks if chunk.ahead]
        return self._drawn_ids[to_device(drawn, self._device, torch.int64)] if drawn else None


class TorchStep:
    """Implements `engine.runner.step_runner.Launched`; only `result` waits for the device.

    Args:
        ordered: `chunks` in `StepShape`'s order.
        wanted: number of last tokens of each chunk in `logits`, in that order.
        logits: [sum(wanted), vocab], valid until the next launch.
    """

    def __init__(
        self,
        runner: TorchRunner,
        chunks: Sequence[Chunk],
        ordered: Sequence[Chunk],
        wanted: Sequence[int],
        logits: torch.Tensor,
    ) -> None:
        self._runner = runner
        self.chunks = chunks
        self._ordered = ordered
        self._wanted = wanted
        self._logits: torch.Tensor | None = logits
        self._prompts: list[tuple[Request, PromptLogprobs]] = []
        self._draw: Draw | None = None

    @torch.inference_mode()
    def sample(self) -> None:
        logits, self._logits = self._logits, None
        assert logits is not None, "a step is sampled once"
        rows = [DROPPED if chunk.dropped else row for chunk in self._ordered for row in chunk.rows]
        with self._runner.failing(len(self._ordered)):
            if sum(self._wanted) > len(rows):
                logits = self._read_prompts(logits)
            if rows:
                self._draw = self._runner.sampler.draw(logits, rows)
                # only for a step planned ahead; with drafts, none is
                self._runner.drawn([chunk.request for chunk in self._ordered if chunk.samples], self._draw.token_ids)
            self._arrival = Arrival(logits.device)

    def wait_s(self) -> float:
        return self._arrival.wait_s()

    def result(self) -> Sequence[Sequence[int]]:
        self._arrival.wait()
        with self._runner.failing(len(self._ordered)):
            drawn = iter(self._draw.read() if self._draw is not None else ())
            broken = {request for request, prompt in self._prompts if not prompt.store()}
        token_ids = {chunk: [next(drawn) for _ in chunk.rows] for chunk in self._ordered}
        return [(NO_TOKEN,) if chunk.request in broken else token_ids[chunk] for chunk in self.chunks]

    def _read_prompts(self, logits: torch.Tensor) -> torch.Tensor:
        """Record prompt log-probabilities.

        Returns: the logits to sample from, [rows, vocab].
        """
        drawn: list[int] = []
        first = 0
        for chunk, count in zip(self._ordered, self._wanted, strict=True):
            if chunk.request.reads_prompt and not chunk.dropped:
                logprobs = PromptLogprobs(chunk.request.row, logits[first : first + count], chunk.start)
                self._prompts.append((chunk.request, logprobs))
            first += count
            drawn += range(first - len(chunk.rows), first)
        return logits[to_device(drawn, logits.device, torch.int64)]
