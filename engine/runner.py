"""One step on the device: chunks flattened into one sequence, through the model, to sampled tokens."""

from collections.abc import Sequence

import torch

from engine.attention.backend import AttentionBackend, StepShape
from engine.compilation.forward import Forward
from engine.core import StepFailed
from engine.lora.load import Adapters
from engine.sampling.logprobs import note_prompt
from engine.sampling.sampler import sample
from engine.scheduler.scheduler import Chunk


class TorchRunner:
    """Runs chunks through a transformers model whose attention reads and writes the page pool."""

    def __init__(
        self,
        device: torch.device,
        forward: Forward,
        attention: AttentionBackend,
        storage: torch.Tensor,
        adapters: Adapters,
    ) -> None:
        """Step a model through `forward`; `attention` keeps its KV in `storage`, [num_pages, ...]."""
        self._device = device
        self._forward = forward
        self._attention = attention
        self._storage = storage
        self._adapters = adapters

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Compute `chunks`, one a request; the token sampled for each, None for a prompt that goes on.

        Raises: StepFailed, for what went wrong with this batch. A device that is lost raises what torch raises.
        """
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].length > 1, len(chunks[i].request.tokens)))
        ordered = [chunks[i] for i in order]
        try:
            sampled = self._sample(ordered)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError, IndexError, MemoryError) as exc:
            raise StepFailed(f"computing a step of {len(chunks)} requests failed: {exc}") from exc
        token_ids: list[int | None] = [None] * len(chunks)
        for i, token_id in zip(order, sampled, strict=True):
            token_ids[i] = token_id
        return token_ids

    @torch.inference_mode()
    def _sample(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Token ids for `chunks`, which are in the order that `StepShape` asks for."""
        samples = [chunk.samples for chunk in chunks]
        wanted = [chunk.length if chunk.request.reads_prompt else int(chunk.samples) for chunk in chunks]
        logits = self._logits(chunks, wanted)
        if sum(wanted) > sum(samples):
            logits = self._read_prompts(chunks, wanted, logits)
        rows = [chunk.request.row for chunk, drawn in zip(chunks, samples, strict=True) if drawn]
        token_ids = iter(sample(logits, rows) if rows else ())
        return [next(token_ids) if drawn else None for drawn in samples]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's KV of all layers; on a device, in its order of work."""
        self._storage[target].copy_(self._storage[source])

    def _read_prompts(self, chunks: Sequence[Chunk], wanted: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Note what prompts' logits are there for; returns those to sample from, [number of chunks that do, vocab]."""
        drawn: list[int] = []
        first = 0
        for chunk, count in zip(chunks, wanted, strict=True):
            if chunk.request.reads_prompt:
                note_prompt(chunk.request.row, logits[first : first + count], chunk.request.num_computed)
            first += count
            if chunk.samples:
                drawn.append(first - 1)
        return logits[drawn]

    def _logits(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> torch.Tensor:
        """float32 [sum(wanted), vocab], of the last wanted[i] tokens of each chunk."""
        token_ids: list[int] = []
        positions: list[int] = []
        lasts: list[int] = []
        for chunk, count in zip(chunks, wanted, strict=True):
            start = chunk.request.num_computed
            token_ids += chunk.request.tokens[start : start + chunk.length]
            positions += range(start, start + chunk.length)
            lasts += range(len(token_ids) - count, len(token_ids))
        shape = StepShape(
            query_lens=[chunk.length for chunk in chunks],
            context_lens=[chunk.request.num_computed + chunk.length for chunk in chunks],
            block_tables=[chunk.request.pages for chunk in chunks],
        )
        step = self._attention.plan(shape)
        with self._adapters.of_rows([(chunk.request.adapter, chunk.length) for chunk in chunks]):
            return self._forward(self._tensor(token_ids), self._tensor(positions), self._tensor(lasts), step).float()

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
