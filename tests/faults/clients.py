"""A client that reads its tokens from the mesh, like the HTTP side of the frontend."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from components.aio import time_limit
from components.errors import InvariantBroken, KvUnavailable, MeshError
from components.messaging.clocks import now_ms
from components.wire.sampling import SamplingParams
from services.frontend.ports import Prompt
from tests.faults.nodes import MODEL, Frontend
from tests.services.frontend.reading import reading


class Answer(NamedTuple):
    """One choice of a lone engine."""

    tokens: list[int]
    finish: str


@dataclass(eq=False)
class Client:
    """One request and its outcome."""

    number: int
    prompts: list[list[int]]  # one for each choice
    sampling: SamplingParams
    at_s: float
    life_s: float
    adapter: str = ""
    frontend: Frontend | None = field(default=None, init=False)
    task: "asyncio.Task[None] | None" = field(default=None, init=False)
    has_left: bool = field(default=False, init=False)  # or its frontend died
    has_stalled: bool = field(default=False, init=False)  # stopped reading for a while
    received_s: float = field(default=0.0, init=False)  # time of the last token, or of the request
    silence_s: float = field(default=0.0, init=False)  # the longest time without a token
    error: Any = field(default=None, init=False)  # the one that it received
    tokens: list[int] = field(default_factory=list, init=False)
    finish: str | None = field(default=None, init=False)

    @property
    def model(self) -> str:
        return self.adapter or MODEL

    @property
    def has_begun(self) -> bool:
        """Whether it has a token of every choice."""
        return bool(self.tokens)

    @property
    def lacks_kv(self) -> bool:
        """Whether its error is that the prompt's KV did not arrive."""
        return isinstance(self.error, KvUnavailable)

    def __str__(self) -> str:
        return f"client {self.number}: {len(self.tokens)} tokens, {self.finish}, {self.error!r}"

    async def run(self, frontend: Frontend) -> None:
        self.received_s = asyncio.get_running_loop().time()
        deadline = now_ms() + int(self.life_s * 1000)
        prompt = Prompt(f"r{self.number}", self.model, self.prompts[0], self.sampling, "", deadline)
        try:
            async with (
                time_limit(self.life_s, "the request took longer than"),
                reading(frontend.mesh, prompt) as (deltas,),
            ):
                async for delta in deltas:
                    self.end_silence()
                    assert self.finish is None, "tokens after the last one"
                    self.tokens += delta.token_ids
                    self.finish = delta.finish
        except MeshError as exc:
            self.error = exc
        finally:
            self.end_silence()

    def end_silence(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.silence_s = max(self.silence_s, now_s - self.received_s)
        self.received_s = now_s

    def leave(self) -> None:
        assert self.task is not None
        self.has_left = True
        self.task.cancel()

    def stall(self, _seconds: float) -> bool:
        """Stop reading for a while, or return False: it cannot."""
        return False

    def problems(self, answers: list[Answer], *, broken: bool) -> list[str]:
        """Check that the client received all tokens, or some of them and exactly one error.

        `broken`: a fault has garbled a message, or injected InvariantBroken.
        """
        assert self.task is not None
        (tokens, finish), found = answers[0], []
        if self.tokens != tokens[: len(self.tokens)]:
            found.append(f"wrong tokens {self.tokens}, expected {tokens}")
        if self.has_left:
            return found
        if not self.task.done():
            return [*found, "hangs"]
        if self.task.cancelled() or self.task.exception() is not None:
            return [*found, f"{self.task}"]
        if self.error is None and (self.tokens, self.finish) != (tokens, finish):
            found.append(f"{self.tokens} {self.finish}, expected {tokens} {finish}")
        return found + self._about_error(broken=broken)

    def _about_error(self, *, broken: bool) -> list[str]:
        is_bug = isinstance(self.error, InvariantBroken) and not (broken and self.error.message == "injected")
        return [f"{self.error!r}"] if is_bug else []
