"""A mesh that answers from memory, at a pace, and fails on request."""

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace

from components.errors import MeshError
from components.text.tokenizer import TextModel
from components.wire.generate import StreamItem
from components.wire.logprobs import TokenLogprobs
from components.wire.step_stats import DraftCounts
from services.frontend.ports import FleetRoom, Prompt, ServedModel, Sink, Texts
from tests.waiting import until

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
    last_served: list[ServedModel] = field(default_factory=list)  # that are listed once none is served
    prompts: list[Prompt] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0  # generations closed before their end
    deltas: int = 0
    fleet: FleetRoom = field(default_factory=lambda: FleetRoom(0, None, 0))
    # of each delta of a prompt with a prediction, as long as there are some
    draft_counts: Sequence[tuple[int, int]] = ()
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

    def listed_models(self) -> list[ServedModel]:
        return self.served or self.last_served

    def room(self) -> FleetRoom:
        return self.fleet

    async def generate(self, prompt: Prompt, sink: Sink) -> "list[FakeBranch]":
        self.prompts.append(prompt)
        self.spans.append(trace.get_current_span().get_span_context())
        return [FakeBranch(self, prompt, i, sink) for i in range(prompt.sampling.n)]

    async def _deltas(self, prompt: Prompt, branch: int) -> AsyncGenerator[StreamItem, None]:
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
            item = item_of(chunk, finish, told, of_prompt)
            if prompt.prediction and number < len(self.draft_counts):
                item = item._replace(draft_counts=DraftCounts(*self.draft_counts[number]))
            yield item

    async def until_idle(self) -> None:
        await until(lambda: not self.running, lambda: f"{self.running} branches run")


class FakeBranch:
    """One branch: a task that pushes its items."""

    def __init__(self, mesh: FakeMesh, prompt: Prompt, index: int, sink: Sink) -> None:
        self._mesh, self._index, self._sink = mesh, index, sink
        self._is_open = True
        mesh.running += 1
        self._task = asyncio.create_task(self._run(mesh._deltas(prompt, index)))

    def close(self) -> None:
        if self._end():
            self._mesh.cancelled += 1
            self._task.cancel()

    def _end(self) -> bool:
        was_open, self._is_open = self._is_open, False
        self._mesh.running -= was_open
        return was_open

    async def _run(self, items: AsyncGenerator[StreamItem, None]) -> None:
        try:
            async for item in items:
                wanted = self._sink.add_tokens(self._index, item)
                if item.finish is not None:
                    self._end()
                elif not wanted:
                    self.close()
                await asyncio.sleep(0)  # each item comes in a turn of its own
        except Exception as exc:  # noqa: BLE001 - the request ends with it
            self._end()
            self._sink.fail(exc)


def item_of(
    token_ids: list[int],
    finish: str | None,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: Sequence[TokenLogprobs] | None = None,
) -> StreamItem:
    return StreamItem(0, 0, token_ids, finish, None, 2, 0, logprobs, prompt_logprobs)


def vector_of(token_ids: Sequence[int], size: int) -> bytes:
    """Return a vector of length 1, made from the tokens alone."""
    values = [float((sum(token_ids) * 7 + i * i) % 11 - 5) for i in range(size)]
    length = math.hypot(*values)
    return array("f", [value / length for value in values]).tobytes()


def logprobs_of(token_id: int, alternatives: int) -> TokenLogprobs:
    """A token is as probable as its id is low, and its neighbours are less so."""
    top = tuple((token_id + i, -token_id / 64 - i) for i in range(alternatives))
    return TokenLogprobs(-token_id / 64, top)
