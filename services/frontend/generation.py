"""Token deltas to text: what happens to each token between the mesh and the wire format."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from components.errors import InvariantBroken
from components.openai.fields import Usage
from components.openai.logprobs import ShownToken
from components.output.calls import CallDelta
from components.output.plan import OutputPlan
from components.text.stop import StopStrings
from components.text.tokenizer import TextModel
from components.wire.logprobs import TokenLogprobs
from components.wire.tokens import unpack_tokens
from services.frontend.merge import merged
from services.frontend.metrics import GapCounts
from services.frontend.ports import Mesh, Prompt, TokenDelta
from services.frontend.shown import shown_prompt, shown_token


class Piece(NamedTuple):
    """New text of one choice; empty while a character or a possible stop string is incomplete."""

    choice: int  # its index
    text: str
    finish: str | None
    tokens: list[ShownToken] | None = None  # that came with it, when log-probabilities are asked for
    reasoning: str = ""  # new text of what the model thinks before it answers
    calls: Sequence[CallDelta] = ()  # of tools
    token_ids: Sequence[int] = ()  # that count, whatever of their text is shown

    @property
    def tells(self) -> bool:
        """Whether there is anything to see in it, beside an end."""
        return bool(self.text or self.tokens or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """What the choices of one prompt are made from."""

    prompt: Prompt
    stops: Sequence[str] = ()
    echo: str = ""  # shown before the generated text, and not searched for stop strings
    continues: bool = False  # the generation continues the prompt's text, rather than answer it
    output: OutputPlan | None = None  # what its texts are to be taken apart into; None: they are shown as they are
    shows_special: bool = False  # special tokens are text
    shows_end: bool = False  # a stop string, or the text of a token that ends the answer, is part of it
    echo_alternatives: int | None = None  # with the prompt's tokens, which are told of before the first one


class Choice:
    """One generated text in the making."""

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_ends",
        "_length",
        "_stops",
        "_text",
        "finish",
        "generated_tokens",
        "index",
        "prompt",
        "prompt_tokens",
        "prompt_told",
        "told_s",
    )

    def __init__(self, index: int, spec: PromptSpec, text: TextModel) -> None:
        self.index = index
        self.prompt = spec.prompt
        self.finish: str | None = None
        self.generated_tokens = 0
        self.told_s = 0.0  # when its last piece was made, of a clock of ours; 0: none was
        self.prompt_tokens: list[ShownToken] = []  # to tell of before the first token, by then
        self.prompt_told: Sequence[TokenLogprobs] | None = None  # of the prompt, from its second token on
        self._echo = spec.echo
        self._ends: frozenset[int] = frozenset()  # tokens whose text is not shown when the answer ends with them
        if not spec.shows_end:
            stop_ids = unpack_tokens(spec.prompt.sampling.stop_token_ids)
            self._ends = text.specials.union(stop_ids) if spec.shows_special else frozenset(stop_ids)
        self._text = text
        self._length = len(spec.echo)  # of the text so far, what a stop string may take away included
        shown = frozenset[int]() if spec.output is None else spec.output.shown
        self._detokenizer = text.detokenizer(
            spec.prompt.token_ids if spec.continues else (), shown, skip=not spec.shows_special
        )
        self._stops = StopStrings(spec.stops, included=spec.shows_end) if spec.stops else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return None if self._stops is None else self._stops.found

    async def begin(self) -> None:
        """To be called before the first delta is taken."""

    def take(self, delta: TokenDelta) -> Piece:
        """The text that `delta` adds; sets `finish` when it is the last."""
        self.finish = delta.finish
        before = self.generated_tokens
        tokens: list[ShownToken] | None = None
        hides_last = delta.finish == "stop" and not self._ends.isdisjoint(delta.token_ids[-1:])
        if self._stops is None and delta.logprobs is None:
            self.generated_tokens += len(delta.token_ids)
            text = self._detokenizer.feed(delta.token_ids[:-1] if hides_last else delta.token_ids)
            if delta.finish is not None:
                text += self._detokenizer.flush()
        else:
            text, tokens = self._one_by_one(self._stops or StopStrings(()), delta, hides_last=hides_last)
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self.prompt_tokens and tokens is not None:
            tokens, self.prompt_tokens = self.prompt_tokens + tokens, []
        counted = self.generated_tokens - before
        token_ids = delta.token_ids if counted == len(delta.token_ids) else delta.token_ids[:counted]
        return Piece(self.index, text, self.finish, tokens, "", (), token_ids)

    def _one_by_one(
        self, stops: StopStrings, delta: TokenDelta, *, hides_last: bool
    ) -> tuple[str, list[ShownToken] | None]:
        """The text, and the tokens that count: none behind a stop string."""
        told, shown = delta.logprobs, ""
        tokens: list[ShownToken] | None = None if told is None else []
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            self.generated_tokens += 1
            if told is not None and tokens is not None:
                tokens.append(shown_token(self._text.token_bytes, token_id, told[i], self._length))
            new = "" if hides_last and i == last else self._detokenizer.feed([token_id])
            self._length += len(new)
            text, matched = stops.feed(new)
            shown += text
            if matched:
                self.finish = "stop"
                return shown, tokens
        if delta.finish is None:
            return shown, tokens
        text, matched = stops.feed(self._detokenizer.flush())
        if matched:
            self.finish = "stop"
        return shown + text + ("" if matched else stops.flush()), tokens


class TakenApart(Choice):
    """One whose text is reasoning, answer and calls of tools. Stop strings and log-probabilities are of the whole text."""

    __slots__ = ("_before", "_parser")

    def __init__(self, index: int, spec: PromptSpec, text: TextModel, plan: OutputPlan) -> None:
        super().__init__(index, spec, text)
        self._parser = plan.parser(tells_before=bool(spec.echo))
        self._before = plan.before
        self._echo = ""  # the parser tells of it

    async def begin(self) -> None:
        """Read what the answer goes on from."""
        await self._text.run(len(self._before), self._parser.begin)

    def take(self, delta: TokenDelta) -> Piece:
        """What `delta` adds to each of them; sets `finish` when it is the last, or the only call that was wanted is there."""
        piece = super().take(delta)
        parser = self._parser
        text, reasoning, calls = parser.feed(piece.text)
        if parser.done:
            self.finish = "tool_calls"
        elif self.finish is not None:
            more, thought, last = parser.flush()
            text, reasoning, calls = text + more, reasoning + thought, [*calls, *last]
            if parser.called and self.finish == "stop":
                self.finish = "tool_calls"
        return Piece(self.index, text, self.finish, piece.tokens, reasoning, calls, piece.token_ids)


class Branches:
    """One prompt and its choices."""

    def __init__(self, first: int, spec: PromptSpec, text: TextModel) -> None:
        self.prompt = spec.prompt
        indices, plan = range(first, first + spec.prompt.sampling.n), spec.output
        self.choices = [Choice(i, spec, text) if plan is None else TakenApart(i, spec, text, plan) for i in indices]
        self._text = text
        self._echo_alternatives = spec.echo_alternatives
        self._told = asyncio.Event()
        self._tokens: list[ShownToken] = []

    async def tell(self, choice: Choice, delta: TokenDelta) -> None:
        """Have `choice`, of which `delta` is the first, tell of the prompt's tokens: they come with branch 0's alone."""
        if self.prompt.sampling.prompt_logprobs is None:
            return
        if delta.prompt_logprobs is not None:
            for each in self.choices:
                each.prompt_told = delta.prompt_logprobs
            if (count := self._echo_alternatives) is not None:
                shown = partial(shown_prompt, self._text, self.prompt.token_ids, delta.prompt_logprobs, count)
                self._tokens = await self._text.run(len(self.prompt.token_ids) * (1 + count), shown)
            self._told.set()
        await self._told.wait()
        choice.prompt_tokens = self._tokens


class Outlet(Protocol):
    """A way to the client that takes a piece without waiting."""

    @property
    def is_open(self) -> bool:
        """Whether it does at the moment."""

    def send(self, piece: Piece) -> None:
        """Have the piece on its way; while it is open."""


class Generation:
    """All choices of one request, generated side by side."""

    def __init__(
        self,
        mesh: Mesh,
        text: TextModel,
        specs: Sequence[PromptSpec],
        gaps: GapCounts,
        began: Callable[[int], None],
    ) -> None:
        """`began` is told of each choice's first token, with the tokens of its prompt if it is the prompt's first choice."""
        self._prompts: list[Branches] = []
        self.choices: list[Choice] = []  # prompt by prompt
        for spec in specs:
            branches = Branches(len(self.choices), spec, text)
            self._prompts.append(branches)
            self.choices += branches.choices
        self.first_unix_ns = 0  # when the first delta arrived
        self.text = text
        self.num_generated = 0  # tokens so far, over all choices
        self._num_prompt = sum(len(branches.prompt.token_ids) for branches in self._prompts)
        self._num_cached = 0  # of them
        self._mesh = mesh
        self._gaps = gaps
        self._began = began
        self._last: Piece | None = None  # that was made for the outlet, and turned out to be the last

    def usage(self) -> Usage:
        """Tokens so far, over all choices; a prompt counts once, whatever the number of its choices."""
        return Usage.of(self._num_prompt, self.num_generated, self._num_cached)

    def pieces(self, outlet: Outlet | None = None) -> AsyncGenerator[Piece, None]:
        """Text as it arrives; closing the generator cancels what still runs.

        What comes while whoever reads it waits may leave by `outlet` instead, in its order; never the first and the last piece.
        Raises: MeshError.
        """
        direct = outlet if len(self.choices) == 1 else None  # others wait in a queue, where order could be lost
        return merged([self._pieces_of(branches, direct) for branches in self._prompts])

    async def _pieces_of(self, branches: Branches, outlet: Outlet | None) -> AsyncGenerator[Piece, None]:
        offer = None if outlet is None else partial(self._offered, outlet, branches.choices[0])
        async with self._mesh.generate(branches.prompt, offer) as streams:
            pairs = zip(branches.choices, streams, strict=True)
            async with aclosing(merged([self._follow(branches, *pair) for pair in pairs])) as pieces:
                async for piece in pieces:
                    yield piece

    async def _follow(
        self, branches: Branches, choice: Choice, stream: AsyncGenerator[TokenDelta, None]
    ) -> AsyncGenerator[Piece, None]:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if not choice.told_s:
                    self.first_unix_ns = self.first_unix_ns or time.time_ns()
                    if choice is branches.choices[0]:
                        self._num_cached += delta.num_cached_tokens
                        self._began(len(choice.prompt.token_ids))
                    else:
                        self._began(0)
                    await branches.tell(choice, delta)
                    await choice.begin()
                piece, self._last = self._last or self._piece(choice, delta), None
                yield piece
                if choice.finish is not None and delta.finish is None:
                    return  # a stop string, or all that was wanted: closing the deltas cancels the work
        if choice.finish is None:
            raise InvariantBroken("tokens ended without a finish reason", request_id=choice.prompt.request_id)

    def _offered(self, outlet: Outlet, choice: Choice, delta: TokenDelta) -> bool:
        """Whether the piece that `delta` makes has left by `outlet`."""
        if not outlet.is_open:
            return False
        piece = self._piece(choice, delta)
        if piece.finish is not None:  # a stop string, or all that was wanted
            self._last = piece
            return False
        outlet.send(piece)
        return True

    def _piece(self, choice: Choice, delta: TokenDelta) -> Piece:
        """What `delta` adds, counted."""
        now = time.perf_counter()
        if choice.told_s:
            self._gaps.observe(now - choice.told_s)
        choice.told_s = now
        piece = choice.take(delta)
        self.num_generated += len(piece.token_ids)
        return piece
