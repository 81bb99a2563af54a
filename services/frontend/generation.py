"""Token deltas to text: what happens to each token between the mesh and the wire format."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from components.errors import InvariantBroken
from components.openai.fields import Usage
from components.text.stop import StopStrings
from components.text.tokenizer import TextModel
from services.frontend.metrics import GapCounts
from services.frontend.ports import Mesh, Prompt, TokenDelta


class Piece(NamedTuple):
    """New text of one choice; empty while a character or a possible stop string is incomplete."""

    choice: int  # its index
    text: str
    finish: str | None


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """What one choice is made from."""

    prompt: Prompt
    stops: Sequence[str] = ()
    echo: str = ""  # shown before the generated text, and not searched for stop strings
    continues: bool = False  # the generation continues the prompt's text, rather than answer it


class Choice:
    """One generated text in the making."""

    __slots__ = ("_detokenizer", "_echo", "_stops", "cached_tokens", "finish", "generated_tokens", "index", "prompt")

    def __init__(self, index: int, spec: ChoiceSpec, text: TextModel) -> None:
        self.index = index
        self.prompt = spec.prompt
        self.finish: str | None = None
        self.generated_tokens = 0
        self.cached_tokens = 0
        self._echo = spec.echo
        self._detokenizer = text.detokenizer(spec.prompt.token_ids if spec.continues else ())
        self._stops = StopStrings(spec.stops) if spec.stops else None

    def take(self, delta: TokenDelta) -> Piece:
        """The text that `delta` adds; sets `finish` when it is the last."""
        if self.generated_tokens == 0:
            self.cached_tokens = delta.num_cached_tokens
        self.finish = delta.finish
        if self._stops is None:
            self.generated_tokens += len(delta.token_ids)
            text = self._detokenizer.feed(delta.token_ids)
            if delta.finish is not None:
                text += self._detokenizer.flush()
        else:
            text = self._until_stop(self._stops, delta)
        if self._echo:
            text, self._echo = self._echo + text, ""
        return Piece(self.index, text, self.finish)

    def _until_stop(self, stops: StopStrings, delta: TokenDelta) -> str:
        shown = ""
        for token_id in delta.token_ids:  # one by one: tokens after the match do not count
            self.generated_tokens += 1
            text, matched = stops.feed(self._detokenizer.feed([token_id]))
            shown += text
            if matched:
                self.finish = "stop"
                return shown
        if delta.finish is None:
            return shown
        text, matched = stops.feed(self._detokenizer.flush())
        if matched:
            self.finish = "stop"
        return shown + text + ("" if matched else stops.flush())


class Generation:
    """All choices of one request, generated side by side."""

    def __init__(self, mesh: Mesh, text: TextModel, specs: Sequence[ChoiceSpec], gaps: GapCounts) -> None:
        self.choices = [Choice(i, spec, text) for i, spec in enumerate(specs)]
        self.first_unix_ns = 0  # when the first delta arrived
        self._mesh = mesh
        self._gaps = gaps

    def usage(self) -> Usage:
        """Tokens so far, over all choices."""
        return Usage.of(
            sum(len(choice.prompt.token_ids) for choice in self.choices),
            sum(choice.generated_tokens for choice in self.choices),
            sum(choice.cached_tokens for choice in self.choices),
        )

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Text as it arrives; closing the generator cancels what still runs. Raises: MeshError."""
        if len(self.choices) == 1:
            return self._pieces_of(self.choices[0])
        return self._merged()

    async def _pieces_of(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        last: float | None = None
        async with aclosing(self._mesh.generate(choice.prompt)) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                if last is not None:
                    self._gaps.observe(now - last)
                elif not self.first_unix_ns:
                    self.first_unix_ns = time.time_ns()
                last = now
                yield choice.take(delta)
                if choice.finish is not None and delta.finish is None:
                    return  # a stop string: closing the deltas cancels the work
        if choice.finish is None:
            raise InvariantBroken("tokens ended without a finish reason", request_id=choice.prompt.request_id)

    async def _merged(self) -> AsyncGenerator[Piece, None]:
        # unbounded: what it can hold is bounded by max_tokens of each prompt
        queue: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            async with aclosing(self._pieces_of(choice)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)

        tasks = [asyncio.create_task(pump(choice)) for choice in self.choices]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Piece):
                    yield item
                else:
                    running -= 1
                    item.result()  # raises what ended it
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
