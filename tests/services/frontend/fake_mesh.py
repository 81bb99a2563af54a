"""A mesh that answers from memory, at a pace, and fails on request."""

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry import trace

from components.errors import MeshError
from components.text.tokenizer import TextModel
from components.wire.logprobs import TokenLogprobs
from services.frontend.ports import FleetRoom, Offer, Prompt, ServedModel, Texts, TokenDelta

MODEL = "tiny"
CONTEXT = 512


@dataclass(slots=True)
class FakeMesh:
    text: TextModel
    answers: Sequence[str] = ()  # of the branches, in place of `answer`
    answer: str = "The capital of France is Paris."
    pace_s: float = 0.0
    gate: asyncio.Semaphore | None = None  # if set, each delta takes one permit
    tokens_per_delta: int = 1
    fail_at: int | None = None  # the delta instead of which `failure` is raised
    failure: Exception = field(default_factory=lambda: MeshError("broken"))
    served: list[ServedModel] = field(default_factory=lambda: [ServedModel(MODEL, CONTEXT, 1_700_000_000)])
    prompts: list[Prompt] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0  # generations closed before their end
    deltas: int = 0
    fleet: FleetRoom = field(default_factory=lambda: FleetRoom(0, None, 0))
    spans: list[trace.SpanContext] = field(default_factory=list)  # current when a generation began

    async def embed(self, texts: Texts) -> list[bytes]:
        if self.gate is not None:
            self.running += 1
            try:
                await self.gate.acquire()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.running -= 1
        if self.fail_at == 0:
            raise self.failure
        self.texts.append(texts)
        size = next(
            model.embedding.dimensions for model in self.served if model.name == texts.model and model.embedding
        )
        return [vector_of(token_ids, size) for token_ids in texts.token_ids]

    def models(self) -> list[ServedModel]:
        return self.served

    def room(self) -> FleetRoom:
        return self.fleet

    @asynccontextmanager
    async def generate(
        self, prompt: Prompt, offer: Offer | None = None
    ) -> AsyncIterator[list[AsyncGenerator[TokenDelta, None]]]:
        self.prompts.append(prompt)
        self.spans.append(trace.get_current_span().get_span_context())
        branches = [self._branch(prompt, i, offer) for i in range(prompt.sampling.n)]
        try:
            yield branches
        finally:
            for branch in branches:
                await branch.aclose()

    async def _branch(self, prompt: Prompt, branch: int, offer: Offer | None) -> AsyncGenerator[TokenDelta, None]:
        self.running += 1
        told = False
        try:
            async for delta in self._deltas(prompt, branch):
                if offer is not None and told and delta.finish is None and offer(delta):
                    continue  # whoever reads waits: this runs for it
                told = True
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _deltas(self, prompt: Prompt, branch: int) -> AsyncGenerator[TokenDelta, None]:
        answer = self.answers[branch % len(self.answers)] if self.answers else self.answer
        whole = self.text._encode(answer, add_special_tokens=False)
        sampling = prompt.sampling
        ids = whole[: sampling.max_tokens]
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
            finish = ("stop" if len(ids) == len(whole) else "length") if last else None
            told = None if sampling.logprobs is None else [logprobs_of(t, sampling.logprobs) for t in chunk]
            asked = sampling.prompt_logprobs if branch == 0 and number == 0 else None
            of_prompt = None if asked is None else [logprobs_of(t, asked) for t in prompt.token_ids[1:]]
            yield TokenDelta(chunk, finish, 2, told, of_prompt)

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            while self.running:
                await asyncio.sleep(0.001)


def vector_of(token_ids: Sequence[int], size: int) -> bytes:
    """Of length 1, made from the tokens alone."""
    values = [float((sum(token_ids) * 7 + i * i) % 11 - 5) for i in range(size)]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]).tobytes()


def logprobs_of(token_id: int, alternatives: int) -> TokenLogprobs:
    """A token is as probable as its id is low, and its neighbours are less so."""
    top = tuple((token_id + i, -token_id / 64 - i) for i in range(alternatives))
    return TokenLogprobs(-token_id / 64, top)
