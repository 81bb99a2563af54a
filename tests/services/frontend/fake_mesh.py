"""A mesh that answers from memory, at a pace, and fails on request."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from opentelemetry import trace

from components.errors import MeshError
from components.text.tokenizer import TextModel
from services.frontend.ports import Prompt, ServedModel, TokenDelta

MODEL = "tiny"
CONTEXT = 512


@dataclass(slots=True)
class FakeMesh:
    text: TextModel
    answer: str = "The capital of France is Paris."
    pace_s: float = 0.0
    gate: asyncio.Semaphore | None = None  # if set, each delta takes one permit
    tokens_per_delta: int = 1
    fail_at: int | None = None  # the delta instead of which `failure` is raised
    failure: Exception = field(default_factory=lambda: MeshError("broken"))
    served: list[ServedModel] = field(default_factory=lambda: [ServedModel(MODEL, CONTEXT, 1_700_000_000)])
    prompts: list[Prompt] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0  # generations closed before their end
    deltas: int = 0
    spans: list[trace.SpanContext] = field(default_factory=list)  # current when a generation began

    def models(self) -> list[ServedModel]:
        return self.served

    async def generate(self, prompt: Prompt) -> AsyncGenerator[TokenDelta, None]:
        self.prompts.append(prompt)
        self.spans.append(trace.get_current_span().get_span_context())
        self.running += 1
        try:
            async for delta in self._deltas(prompt):
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _deltas(self, prompt: Prompt) -> AsyncGenerator[TokenDelta, None]:
        whole = self.text._encode(self.answer, add_special_tokens=False)
        ids = whole[: prompt.sampling.max_tokens]
        for number, start in enumerate(range(0, len(ids), self.tokens_per_delta)):
            if number == self.fail_at:
                raise self.failure
            if self.gate is not None:
                await self.gate.acquire()
            if number and self.pace_s:
                await asyncio.sleep(self.pace_s)
            chunk = ids[start : start + self.tokens_per_delta]
            last = start + self.tokens_per_delta >= len(ids)
            self.deltas += 1
            yield TokenDelta(chunk, ("stop" if len(ids) == len(whole) else "length") if last else None, 2)

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            while self.running:
                await asyncio.sleep(0.001)
